"""Resolves job, mesh and strategies into a sharding plan and a program: one immutable object.

A plan is checked, estimated, drawn and executed. It holds everything that affects results (collective
algorithms included), so that a resumed run makes the same choices, and `hash` identifies them. The options
around the run (`RunConfig`: folders, intervals) are carried along and do not count.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from typing import Any, final

from meshwright.plan.hardware.memory_tiers import ON_DEVICE
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.job.python_file import source_digest
from meshwright.plan.model_spec.model_spec import FLOAT_NBYTES, ModelSpec
from meshwright.plan.optimizer_per_param import depends_on_role, shard_alignment_of
from meshwright.plan.role_programs import all_roles, role_of_view
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.gradient_noise_actions import noise_scale_diagnostics
from meshwright.plan.step.program import Action, Program, Role, Transfer
from meshwright.plan.strategy_compatibility import (
    alignment_diagnostics,
    batch_diagnostics,
    batch_statistic_diagnostics,
    batch_sum_diagnostics,
    global_batch_diagnostics,
    model_diagnostics,
    precision_diagnostics,
    sample_diagnostics,
    sharding_diagnostics,
    strategy_choice_diagnostics,
)
from meshwright.plan.strategy_interface import Strategy, sort_by_phase
from meshwright.plan.strategy_state import StateSpec, job_states, owner_names, state_diagnostics


@dataclass(frozen=True)
class Plan:
    """A resolved plan of all ranks. Build it with `Plan.make`, which refuses what cannot work, with all
    diagnostics at once, and take the plan of one rank by `for_rank`.
    """

    job: Job
    run: RunConfig
    mesh: Mesh
    micro_batch: int
    strategies: tuple[Strategy, ...]
    sharding: ShardingPlan
    program: Program
    file_digests: tuple[tuple[tuple[str, str], ...], ...] = ()  # by strategy, of the files that it names
    align_bytes: int = 1  # buffers begin each parameter and shard at a multiple of it

    @staticmethod
    def make(
        job: Job,
        mesh: Mesh,
        model_spec: ModelSpec,
        strategies: Iterable[Strategy] = (),
        micro_batch: int = 0,
        run: RunConfig | None = None,
        *,
        found: Iterable[Diagnostic] | None = None,
        alignment_optimizer: OptimizerConfig | None = None,
        align_bytes: int = 1,
    ) -> "Plan":
        """Returns the plan for `job` on `mesh`: strategies applied in phase order. `micro_batch` = 0 takes
        the whole local batch.

        Shards are aligned for the job's optimizer, or for `alignment_optimizer` (a comparison updates with
        another one). In a buffer of several parameters each, and each shard, begins at a multiple of
        `align_bytes` bytes; 1: without padding. `found` are the diagnostics of job and run, if they were
        checked already. Raises PlanError with these and every diagnostic of the mesh, the batch and the
        strategies.
        """
        run = run or RunConfig()
        diagnostics = [*(job.diagnostics(run) if found is None else found)]
        ordered = sort_by_phase(strategies)
        diagnostics += alignment_diagnostics(align_bytes)
        sharding = ShardingPlan.one_device(mesh, model_spec)
        alignment_optimizer = alignment_optimizer or job.optimizer
        sharding = sharding.map_param_shardings(
            lambda param_sharding: replace(
                param_sharding, shard_alignment=shard_alignment_of(alignment_optimizer, param_sharding.param)
            )
        )
        diagnostics += [*strategy_choice_diagnostics(ordered), *model_diagnostics(model_spec)]
        for strategy in ordered:
            diagnostics += strategy.check(job, sharding)
            sharding = strategy.place(sharding)
        diagnostics += [
            diagnostic for strategy in ordered for diagnostic in strategy.check_combined(sharding)
        ]
        sharding = sharding.map_param_shardings(
            lambda param_sharding: (
                replace(param_sharding, shard_alignment="matrix")
                if param_sharding.owner_axes
                else param_sharding
            )
        )
        diagnostics += [*sharding_diagnostics(sharding, ordered), *precision_diagnostics(job, sharding)]
        diagnostics += [
            *batch_diagnostics(job, sharding, micro_batch),
            *global_batch_diagnostics(job, sharding, micro_batch),
            *batch_statistic_diagnostics(job, sharding, micro_batch),
            *batch_sum_diagnostics(sharding),
        ]
        diagnostics += noise_scale_diagnostics(job, sharding, micro_batch)
        diagnostics += sample_diagnostics(sharding, run.sample_tokens)
        raise_diagnostics(diagnostics)
        micro_batch = micro_batch or job.train.batch // sharding.num_data
        sharding = replace(sharding, align_numel=_align_numel(align_bytes, job, model_spec))
        file_digests = tuple((*_own_digest(each), *each.file_digests()) for each in ordered)
        plan = Plan(
            job,
            run,
            mesh,
            micro_batch,
            ordered,
            sharding,
            all_roles(job, sharding, ordered, micro_batch),
            file_digests,
            align_bytes,
        )
        plan._check_files()
        return plan

    def _check_files(self) -> None:
        found = (each.check_files(self.job, self.sharding, self.as_dict) for each in self.strategies)
        raise_diagnostics([diagnostic for each in found for diagnostic in each])

    def check_start(self, num_steps: int) -> None:
        """Raises PlanError if a run of this plan cannot begin behind `num_steps` steps: 0, or those of a
        checkpoint.
        """
        found = (each.check_start(self.sharding, num_steps) for each in self.strategies)
        raise_diagnostics([diagnostic for each in found for diagnostic in each])

    def for_rank(self, rank: int) -> "RankPlan":
        """Returns the plan of `rank`, with its own parameters, slices and action list.

        A rank outside of the mesh has the list of its role, and no parameters. Raises ValueError for a rank
        that plays no role.
        """
        role, view = self.role_of(rank), self.rank_view(rank)
        first = self.rank_view(role.ranks[0])
        is_alike = (view.param_shardings, view.work_share.fractions_by_length) == (
            first.param_shardings,
            first.work_share.fractions_by_length,
        )
        # copies between tiers have the sizes of what the rank holds of each parameter; so have sums of owners
        differs = self.sharding.tiers != ON_DEVICE or self.sharding.has_owners
        if not is_alike or (rank != role.ranks[0] and differs):
            role = role_of_view(self.job, view, self.strategies, self.micro_batch)
        return self._at(rank, view, role)

    def rank_view(self, rank: int) -> RankView:
        """Returns what `rank` has of the sharding plan; a rank outside of the mesh has nothing."""
        return RankView.of(self.sharding, self.mesh.coordinate(rank) if rank < self.mesh.world_size else {})

    def role_of(self, rank: int) -> Role:
        """Returns the role that `rank` plays. Raises ValueError for a rank that plays none."""
        for role in self.program.roles:
            if rank in role.ranks:
                return role
        last = max(role.ranks[-1] for role in self.program.roles)
        raise ValueError(
            f"there is no rank {rank} in {self.mesh}: its roles have ranks 0 to {last}. Choose one of them"
        )

    def stage_role(self, pp_rank: int) -> Role:
        """Returns the role of the ranks at index `pp_rank` along pp."""
        return self.role_of(self.mesh.rank({"pp": pp_rank}))

    def peer_role(self, role: Role, transfer: Transfer) -> Role:
        """Returns the role of the rank that a `transfer` of `role` with one other rank goes to, or comes
        from. Raises ValueError if `transfer` names no peer.
        """
        if transfer.peer is None:
            raise ValueError(f"{transfer} has no peer: it is between all ranks of a group")
        (axis,) = transfer.axes
        return self.role_of(self.mesh.rank({**self.mesh.coordinate(role.ranks[0]), axis: transfer.peer}))

    def role_plans(self) -> Iterator["RankPlan"]:
        """Yields the plan of the first rank of each role, in the order of the program's roles."""
        for role in self.program.roles:
            rank = role.ranks[0]
            yield self._at(rank, self.rank_view(rank), role)

    def with_micro_batch(self, micro_batch: int) -> "Plan":
        """Returns this plan with microbatches of another size: those of a last, smaller batch."""
        train = replace(self.job.train, batch=micro_batch * self.num_microbatches * self.num_data)
        job = replace(self.job, train=train)
        program = all_roles(job, self.sharding, self.strategies, micro_batch)
        return Plan(**self._values(job=job, micro_batch=micro_batch, program=program))

    def with_strategies(
        self,
        strategies: Iterable[Strategy],
        micro_batch: int,
        mesh: Mesh | None = None,
        model_spec: ModelSpec | None = None,
    ) -> "Plan":
        """Returns the plan of the same job and run with other strategies, made anew.

        Raises PlanError as `make`; job and run have been checked.
        """
        return Plan.make(
            self.job,
            mesh or self.mesh,
            model_spec or self.model_spec,
            strategies,
            micro_batch,
            self.run,
            found=(),
            align_bytes=self.align_bytes,
        )

    def with_model_spec(self, model_spec: ModelSpec) -> "Plan":
        """Returns this plan with the specification of the same model on samples of another length."""
        sharding = replace(self.sharding, model_spec=model_spec)
        program = all_roles(self.job, sharding, self.strategies, self.micro_batch)
        return Plan(**self._values(sharding=sharding, program=program))

    def _at(self, rank: int, view: RankView, role: Role) -> "RankPlan":
        return RankPlan(**self._values(), rank=rank, view=view, role=role)

    def _values(self, **changes: Any) -> dict[str, Any]:
        """Returns the fields of the plan of all ranks, with `changes`."""
        return {item.name: getattr(self, item.name) for item in fields(Plan)} | changes

    @property
    def model_spec(self) -> ModelSpec:
        """The whole model."""
        return self.sharding.model_spec

    @property
    def num_data(self) -> int:
        """The number of ranks with different samples."""
        return self.sharding.num_data

    @property
    def local_batch(self) -> int:
        """The samples of one rank in a step."""
        return self.job.train.batch // self.num_data

    @property
    def num_microbatches(self) -> int:
        """The microbatches of one rank in a step."""
        return self.local_batch // self.micro_batch

    @property
    def num_sites(self) -> int:
        """The number of sites that train apart between two rounds; 1 without rounds."""
        return self.sharding.num_workers_along(self.sharding.varying_axes)

    def site_of(self, rank: int) -> int:
        """Returns the index of the site of `rank`."""
        return self.sharding.site_index(self.mesh.coordinate(rank))

    def site_samples(self, site: int) -> tuple[int, ...]:
        """Returns the samples of the global batch that the ranks of `site` read, rising."""
        ranks = (rank for rank in range(self.mesh.world_size) if self.site_of(rank) == site)
        return tuple(sorted({sample for rank in ranks for sample in self.samples_read(rank)}))

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device would compute, up to rounding."""
        return all(strategy.exact for strategy in self.strategies)

    @property
    def tolerance(self) -> float:
        """The relative rounding error of all strategies, beside sums in another order, in units of a block's
        largest number.
        """
        return sum(strategy.tolerance(self.sharding) for strategy in self.strategies)

    def data_index(self, rank: int) -> int:
        """Returns the index of `rank` among the `num_data` parts of the batch; that of a server is behind
        them.
        """
        return self.mesh.index(self.mesh.coordinate(rank), self.sharding.data_axes)

    def microbatch_starts(self, index: int) -> list[int]:
        """Returns the first sample of each microbatch of data index `index`, in the global batch."""
        num_data = self.num_data
        return [
            (microbatch * num_data + index) * self.micro_batch for microbatch in range(self.num_microbatches)
        ]

    def is_primary_rank(self, rank: int) -> bool:
        """Returns whether `rank` reads samples, computes the loss and updates: every rank does, unless a
        primary rank does it for it.
        """
        coordinate = self.mesh.coordinate(rank)
        return not any(coordinate[axis] for axis in self.sharding.primary_rank_axes)

    def is_server(self, rank: int) -> bool:
        """Returns whether `rank` only serves: it reads no samples, and steps parameters for the others."""
        return self.sharding.is_server(self.mesh.coordinate(rank))

    def samples_read(self, rank: int) -> list[int]:
        """Returns the samples of the global batch that `rank` reads, microbatch by microbatch.

        A primary rank reads those of all its ranks, in the order of the batch; they read none. Servers
        read none.
        """
        if rank not in self._samples_by_rank:  # every step asks for them
            self._samples_by_rank[rank] = self._find_samples(rank)
        return self._samples_by_rank[rank]

    @cached_property
    def _samples_by_rank(self) -> dict[int, list[int]]:
        return {}

    def _find_samples(self, rank: int) -> list[int]:
        if self.is_server(rank):
            return []
        if not self.sharding.primary_rank_axes:
            return [
                sample
                for first in self.microbatch_starts(self.data_index(rank))
                for sample in range(first, first + self.micro_batch)
            ]
        indices = (
            {self.data_index(peer) for peer in self.mesh.peers(rank, self.sharding.primary_rank_axes)}
            if self.is_primary_rank(rank)
            else ()
        )
        return sorted(
            sample
            for index in indices
            for first in self.microbatch_starts(index)
            for sample in range(first, first + self.micro_batch)
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything that affects results, as plain values."""
        params = [
            [
                w.name,
                list(w.shape),
                list(w.block_calls),
                list(w.aliases),
                w.trainable,
                *([w.dtype] if w.dtype else []),
            ]
            for w in self.model_spec.params
        ]
        return {
            "job": asdict(self.job),
            "mesh": self.mesh.as_dict(),
            "micro_batch": self.micro_batch,
            **({"align_bytes": self.align_bytes} if self.align_bytes > 1 else {}),
            "strategies": [
                {**strategy.as_dict(), **dict(more)}
                for strategy, more in zip(self.strategies, self.file_digests, strict=True)
            ],
            "block_calls": list(self.model_spec.block_calls),
            "params": params,
            # what rank 0 has decides, as in the hashes of plans that were written before
            **({"layer_calls": _layer_calls(self.model_spec)} if _slices_params(self.rank_view(0)) else {}),
            **({"needs_global_batch": True} if self.model_spec.needs_global_batch else {}),
            **({"num_batch_sums": self.model_spec.num_batch_sums} if self.model_spec.num_batch_sums else {}),
            **(
                {"hidden": [w.name for w in self.model_spec.params if w.is_hidden_matrix]}
                if depends_on_role(self.job.optimizer)
                else {}
            ),
            **(
                {"pretrained": self.model_spec.pretrained_source.digest}
                if self.model_spec.pretrained_source
                else {}
            ),
        }

    @property
    def hash(self) -> str:
        """16 hex digits that identify every choice that affects results."""
        text = json.dumps(_canonical(self.as_dict()), sort_keys=True, separators=(",", ":"))
        return sha256(text.encode()).hexdigest()[:16]


@final
@dataclass(frozen=True, kw_only=True)
class RankPlan(Plan):
    """A plan as one rank executes it: what the rank has of the sharding plan, and its role, whose actions
    have the sizes of this rank.
    """

    rank: int
    view: RankView
    role: Role

    def rank_view(self, rank: int) -> RankView:
        """Returns what `rank` has of the sharding plan; of this rank `view`, which keeps what it computes."""
        return self.view if rank == self.rank else super().rank_view(rank)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions of this rank in a step."""
        return self.role.actions

    @property
    def states(self) -> dict[str, tuple[StateSpec, ...]]:
        """The tensors that this rank keeps from step to step, by the technique that keeps them.

        Raises PlanError for a tensor of a parameter or a dtype that is unknown.
        """
        found = dict(job_states(self.job))
        names = owner_names(strategy.name for strategy in self.strategies)
        for name, strategy in zip(names, self.strategies, strict=True):
            specs = tuple(strategy.states(self.view, self.job))
            raise_diagnostics(state_diagnostics(name, specs, self.view))
            found |= {name: specs} if specs else {}
        return found


def _own_digest(strategy: Strategy) -> tuple[tuple[str, str], ...]:
    """Returns the digest of the file of a technique that a config names by its file."""
    digest = source_digest(type(strategy))
    return (("source", digest),) if digest else ()


def _align_numel(align_bytes: int, job: Job, model_spec: ModelSpec) -> int:
    """Returns of how many elements a multiple begins at a multiple of `align_bytes`, in every dtype."""
    roles = job.precision.roles
    sizes = [FLOAT_NBYTES[roles[role]] for role in ("parameters", "master", "gradients", "reduce")]
    sizes += [param.itemsize(job.precision.parameters) for param in model_spec.params]
    return max(1, align_bytes // min(filter(None, sizes)))  # 0: of an unknown dtype


def _layer_calls(model_spec: ModelSpec) -> list[list[Any]]:
    return [
        [call.name, call.role, *([call.sum_id] if call.sum_id else [])] for call in model_spec.layer_calls
    ]


def _slices_params(view: RankView) -> bool:
    return any(param_sharding.sliced_dims for param_sharding in view.param_shardings)


def _canonical(value: Any) -> Any:
    # plans that hold 1 and 1.0 are equal, so their hashes must be too
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
