"""Job + mesh + strategies, resolved into space and program: one frozen object that is read four ways.

It is checked, priced, drawn and played. Everything that affects numbers stands in it (collective algorithms included),
so that a resumed run makes the same choices, and `hash` names them. What surrounds the run (`Run`: folders, cadence)
is carried along and does not count.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any

from meshwright.plan.job.errors import raise_diagnostics
from meshwright.plan.job.job import Job, OptimizerConfig
from meshwright.plan.job.run_options import RunConfig
from meshwright.plan.model_spec.model_spec import ModelSpec
from meshwright.plan.optimizer_spec import depends_on_role, shard_alignment_of
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_share import local_fractions_by_length
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.step.action import Action, Program, drop_single_rank_transfers
from meshwright.plan.step.gradient_noise import add_noise_scale_actions, noise_scale_diagnostics
from meshwright.plan.step.matrix_owners import add_matrix_owner_actions
from meshwright.plan.step.single_device import role_of, sequential_stage_calls, single_device_program
from meshwright.plan.step.tied_params import add_tied_grad_reductions
from meshwright.plan.strategy import Strategy, sort_by_phase
from meshwright.plan.validation import (
    batch_diagnostics,
    global_batch_diagnostics,
    model_diagnostics,
    precision_diagnostics,
    sharding_diagnostics,
    strategy_choice_diagnostics,
)


@dataclass(frozen=True)
class Plan:
    """A resolved plan. Build it with `Plan.make`, which refuses what cannot work with all its faults at once."""

    job: Job
    run: RunConfig
    mesh: Mesh
    micro_batch: int
    strategies: tuple[Strategy, ...]
    sharding: ShardingPlan
    program: Program
    file_digests: tuple[tuple[tuple[str, str], ...], ...] = ()  # by strategy, what of it stands in no table

    @classmethod
    def make(
        cls,
        job: Job,
        mesh: Mesh,
        model_spec: ModelSpec,
        strategies: Iterable[Strategy] = (),
        micro_batch: int = 0,
        run: RunConfig | None = None,
        *,
        alignment_optimizer: OptimizerConfig | None = None,
    ) -> "Plan":
        """The plan for `job` on `mesh`: strategies applied in phase order. `micro_batch` = 0 takes the whole local batch.

        Weights are cut as finely as the job's optimizer bears, or as `cut_for` does: a comparison steps with another one. Raises
        PlanError with every fault of the job, the mesh, the batch and the strategies.
        """
        run = run or RunConfig()
        ordered = sort_by_phase(strategies)
        space = ShardingPlan.one_device(mesh, model_spec)
        alignment_optimizer = alignment_optimizer or job.optimizer
        space = space.map_param_shardings(
            lambda home: replace(home, shard_alignment=shard_alignment_of(alignment_optimizer, home.param))
        )
        faults = [
            *job.diagnostics(),
            *run.diagnostics(),
            *strategy_choice_diagnostics(ordered),
            *model_diagnostics(model_spec),
        ]
        for strategy in ordered:
            faults += strategy.check(job, space)
            space = strategy.place(space)
        faults += [fault for strategy in ordered for fault in strategy.check_combined(space)]
        space = space.map_param_shardings(
            lambda home: replace(home, shard_alignment="matrix") if home.owner_axes else home
        )
        faults += [*sharding_diagnostics(space, ordered), *precision_diagnostics(job, space)]
        faults += [
            *batch_diagnostics(job, space, micro_batch),
            *global_batch_diagnostics(job, space, micro_batch),
        ]
        faults += noise_scale_diagnostics(job, space, micro_batch)
        raise_diagnostics(faults)
        micro_batch = micro_batch or job.train.batch // mesh.group_size(space.data_axes)
        space = space.at_coordinate(mesh.coordinate(0))
        beyond = tuple(strategy.file_digests() for strategy in ordered)
        return cls(
            job, run, mesh, micro_batch, ordered, space, _all_roles(job, space, ordered, micro_batch), beyond
        )

    def for_rank(self, rank: int) -> "Plan":
        """This plan as `rank` plays it, with its own weights, slices of them and list where ranks differ in those."""
        space = self.sharding.at_coordinate(self.mesh.coordinate(rank))
        if space.param_shardings == self.sharding.param_shardings and local_fractions_by_length(
            space
        ) == local_fractions_by_length(self.sharding):
            return replace(self, sharding=space)
        return replace(
            self, sharding=space, program=_program(self.job, space, self.strategies, self.micro_batch)
        )

    def with_micro_batch(self, micro_batch: int) -> "Plan":
        """This plan, as its rank plays it, where each micro-batch has so many rows: what it does on a last one that is short."""
        train = replace(self.job.train, batch=micro_batch * self.num_microbatches * self.num_data)
        job = replace(self.job, train=train)
        program = _program(job, self.sharding, self.strategies, micro_batch)
        return replace(self, job=job, micro_batch=micro_batch, program=program)

    def with_model_spec(self, model_spec: ModelSpec) -> "Plan":
        """This plan with `anatomy` in the place of its own: that of the same model, on rows of another length."""
        space = replace(self.sharding.all_ranks or self.sharding, model_spec=model_spec).at_coordinate(
            dict(self.sharding.coordinate)
        )
        return replace(
            self, sharding=space, program=_all_roles(self.job, space, self.strategies, self.micro_batch)
        )

    def role_plans(self) -> Iterator["Plan"]:
        """This plan as the ranks of each role see it, in the order of the program's roles: that of all of them."""
        for stage in range(len(self.program.roles)):
            yield replace(self, sharding=self.sharding.at_pp_rank(stage))

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the rank whose plan this is plays in a step (`at`; rank 0, before)."""
        return self.program.actions(role_of(dict(self.sharding.coordinate)))

    @property
    def model_spec(self) -> ModelSpec:
        """The whole model, as the plan sees it; `space.anatomy` is what this rank has of it."""
        return (self.sharding.all_ranks or self.sharding).model_spec

    @property
    def num_data(self) -> int:
        """How many ranks hold different samples."""
        return self.mesh.group_size(self.sharding.data_axes)

    @property
    def local_batch(self) -> int:
        """The samples that one rank plays in a step."""
        return self.job.train.batch // self.num_data

    @property
    def num_microbatches(self) -> int:
        """The micro-batches that one rank plays in a step."""
        return self.local_batch // self.micro_batch

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device would compute, up to rounding."""
        return all(strategy.exact for strategy in self.strategies)

    @property
    def tolerance(self) -> float:
        """By how much of the largest of its block a number may be off for what strategies round, beside sums in another order."""
        return sum(strategy.tolerance(self.sharding) for strategy in self.strategies)

    def data_index(self, rank: int) -> int:
        """Which of the `num_data` shares of the samples `rank` plays."""
        return self.mesh.index(self.mesh.coordinate(rank), self.sharding.data_axes)

    def microbatch_starts(self, index: int) -> list[int]:
        """Where the rows of data share `index` begin in the global batch, one start per micro-batch."""
        shares = self.num_data
        return [(micro * shares + index) * self.micro_batch for micro in range(self.num_microbatches)]

    def is_primary_rank(self, rank: int) -> bool:
        """Whether `rank` reads samples, takes losses and steps: all do, unless one is said to do it for others."""
        coordinate = self.mesh.coordinate(rank)
        return not any(coordinate[axis] for axis in self.sharding.primary_rank_axes)

    def samples_read(self, rank: int) -> list[int]:
        """The rows of the global batch that `rank` reads, micro-batch after micro-batch: those that it plays.

        A rank that leads reads those of all that it leads, in the order of the batch; they read none.
        """
        if not self.sharding.primary_rank_axes:
            return [
                row
                for first in self.microbatch_starts(self.data_index(rank))
                for row in range(first, first + self.micro_batch)
            ]
        indices = (
            {self.data_index(peer) for peer in self.mesh.peers(rank, self.sharding.primary_rank_axes)}
            if self.is_primary_rank(rank)
            else ()
        )
        return sorted(
            row
            for index in indices
            for first in self.microbatch_starts(index)
            for row in range(first, first + self.micro_batch)
        )

    def as_dict(self) -> dict[str, Any]:
        """All that affects numbers, as plain values: the job, the mesh, the micro-batch, the strategies, the parameters."""
        weights = [
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
            "strategies": [
                {**strategy.as_dict(), **dict(more)}
                for strategy, more in zip(self.strategies, self.file_digests, strict=True)
            ],
            "block_calls": list(self.model_spec.block_calls),
            "params": weights,
            **({"layer_calls": _layer_calls(self.model_spec)} if _slices_params(self.sharding) else {}),
            **({"needs_global_batch": True} if self.model_spec.needs_global_batch else {}),
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
        """16 hex digits that name every choice that affects numbers."""
        said = json.dumps(_canonical(self.as_dict()), sort_keys=True, separators=(",", ":"))
        return sha256(said.encode()).hexdigest()[:16]


def _layer_calls(model_spec: ModelSpec) -> list[list[Any]]:
    """The calls of layers that can be divided: names, roles, and the numbers of the sums in which several end."""
    return [
        [call.name, call.role, *([call.sum_id] if call.sum_id else [])] for call in model_spec.layer_calls
    ]


def _slices_params(sharding: ShardingPlan) -> bool:
    """Whether weights are cut along dims of theirs."""
    return any(home.sliced_dims for home in sharding.param_shardings)


def _all_roles(
    job: Job, sharding: ShardingPlan, strategies: tuple[Strategy, ...], micro_batch: int
) -> Program:
    """What the ranks of every role do in a step: those that see `space`, and those that run other visits."""
    seen = [sharding.at_pp_rank(index) for index in range(len(sharding.block_calls_by_pp_rank))] or [sharding]
    return Program(
        tuple(role for each in seen for role in _program(job, each, strategies, micro_batch).roles)
    )


def _program(job: Job, sharding: ShardingPlan, strategies: tuple[Strategy, ...], micro_batch: int) -> Program:
    """What the ranks that see `space` do in a step."""
    local = job.train.batch // sharding.mesh.group_size(sharding.data_axes)
    turns = sequential_stage_calls(sharding.model_spec.block_calls, local // micro_batch)
    for strategy in strategies:
        turns = strategy.order_stage_calls(turns, sharding)
    program = single_device_program(sharding, job, micro_batch, turns)
    for strategy in strategies:
        program = strategy.rewrite(program, sharding, job)
    program = drop_single_rank_transfers(
        add_matrix_owner_actions(add_tied_grad_reductions(program, sharding, job), sharding, job),
        sharding.mesh,
    )
    return add_noise_scale_actions(program, sharding) if job.train.noise_scale else program


def _canonical(value: Any) -> Any:
    """`value` with whole numbers written one way: plans that hold 1 and 1.0 are equal, so their hashes are too."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
