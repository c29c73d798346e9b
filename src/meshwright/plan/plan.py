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

from meshwright.plan.job.errors import raise_faults
from meshwright.plan.job.job import Job, Optimizer
from meshwright.plan.job.run_options import Run
from meshwright.plan.model_spec.model_spec import Anatomy
from meshwright.plan.optimizer_spec import by_role, grain_of
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.rank_share import own_shares
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.step.action import Action, Program, among_several
from meshwright.plan.step.gradient_noise import measured, noise_faults
from meshwright.plan.step.matrix_owners import brought
from meshwright.plan.step.single_device import one_after_another, one_device, role_of
from meshwright.plan.step.tied_params import tied
from meshwright.plan.strategy import Strategy, in_phase_order
from meshwright.plan.validation import batch_faults, choice_faults, model_faults, precision_faults, space_faults, whole_faults


@dataclass(frozen=True)
class Plan:
    """A resolved plan. Build it with `Plan.make`, which refuses what cannot work with all its faults at once."""

    job: Job
    run: Run
    mesh: Mesh
    micro_batch: int
    strategies: tuple[Strategy, ...]
    space: Space
    program: Program
    beyond: tuple[tuple[tuple[str, str], ...], ...] = ()  # by strategy, what of it stands in no table

    @classmethod
    def make(
        cls,
        job: Job,
        mesh: Mesh,
        anatomy: Anatomy,
        strategies: Iterable[Strategy] = (),
        micro_batch: int = 0,
        run: Run | None = None,
        *,
        cut_for: Optimizer | None = None,
    ) -> "Plan":
        """The plan for `job` on `mesh`: strategies applied in phase order. `micro_batch` = 0 takes the whole local batch.

        Weights are cut as finely as the job's optimizer bears, or as `cut_for` does: a comparison steps with another one. Raises
        PlanError with every fault of the job, the mesh, the batch and the strategies.
        """
        run = run or Run()
        ordered = in_phase_order(strategies)
        space = Space.one_device(mesh, anatomy)
        cut_for = cut_for or job.optimizer
        space = space.with_homes(lambda home: replace(home, grain=grain_of(cut_for, home.weight)))
        faults = [*job.faults(), *run.faults(), *choice_faults(ordered), *model_faults(anatomy)]
        for strategy in ordered:
            faults += strategy.check(job, space)
            space = strategy.place(space)
        faults += [fault for strategy in ordered for fault in strategy.partners(space)]
        space = space.with_homes(lambda home: replace(home, grain="matrix") if home.apart else home)
        faults += [*space_faults(space, ordered), *precision_faults(job, space)]
        faults += [*batch_faults(job, space, micro_batch), *whole_faults(job, space, micro_batch)]
        faults += noise_faults(job, space, micro_batch)
        raise_faults(faults)
        micro_batch = micro_batch or job.train.batch // mesh.extent(space.data_axes)
        space = space.at(mesh.coordinate(0))
        beyond = tuple(strategy.beyond() for strategy in ordered)
        return cls(job, run, mesh, micro_batch, ordered, space, _all_roles(job, space, ordered, micro_batch), beyond)

    def at(self, rank: int) -> "Plan":
        """This plan as `rank` plays it, with its own weights, slices of them and list where ranks differ in those."""
        space = self.space.at(self.mesh.coordinate(rank))
        if space.homes == self.space.homes and own_shares(space) == own_shares(self.space):
            return replace(self, space=space)
        return replace(self, space=space, program=_program(self.job, space, self.strategies, self.micro_batch))

    def of_rows(self, micro_batch: int) -> "Plan":
        """This plan, as its rank plays it, where each micro-batch has so many rows: what it does on a last one that is short."""
        train = replace(self.job.train, batch=micro_batch * self.num_micro * self.num_data)
        job = replace(self.job, train=train)
        program = _program(job, self.space, self.strategies, micro_batch)
        return replace(self, job=job, micro_batch=micro_batch, program=program)

    def of_anatomy(self, anatomy: Anatomy) -> "Plan":
        """This plan with `anatomy` in the place of its own: that of the same model, on rows of another length."""
        space = replace(self.space.whole or self.space, anatomy=anatomy).at(dict(self.space.coordinate))
        return replace(self, space=space, program=_all_roles(self.job, space, self.strategies, self.micro_batch))

    def views(self) -> Iterator["Plan"]:
        """This plan as the ranks of each role see it, in the order of the program's roles: that of all of them."""
        for stage in range(len(self.program.roles)):
            yield replace(self, space=self.space.stage(stage))

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the rank whose plan this is plays in a step (`at`; rank 0, before)."""
        return self.program.actions(role_of(dict(self.space.coordinate)))

    @property
    def anatomy(self) -> Anatomy:
        """The whole model, as the plan sees it; `space.anatomy` is what this rank has of it."""
        return (self.space.whole or self.space).anatomy

    @property
    def num_data(self) -> int:
        """How many ranks hold different samples."""
        return self.mesh.extent(self.space.data_axes)

    @property
    def local_batch(self) -> int:
        """The samples that one rank plays in a step."""
        return self.job.train.batch // self.num_data

    @property
    def num_micro(self) -> int:
        """The micro-batches that one rank plays in a step."""
        return self.local_batch // self.micro_batch

    @property
    def exact(self) -> bool:
        """Whether the plan computes what one device would compute, up to rounding."""
        return all(strategy.exact for strategy in self.strategies)

    @property
    def tolerance(self) -> float:
        """By how much of the largest of its block a number may be off for what strategies round, beside sums in another order."""
        return sum(strategy.tolerance(self.space) for strategy in self.strategies)

    def data_index(self, rank: int) -> int:
        """Which of the `num_data` shares of the samples `rank` plays."""
        return self.mesh.index(self.mesh.coordinate(rank), self.space.data_axes)

    def first_rows(self, index: int) -> list[int]:
        """Where the rows of data share `index` begin in the global batch, one start per micro-batch."""
        shares = self.num_data
        return [(micro * shares + index) * self.micro_batch for micro in range(self.num_micro)]

    def leads(self, rank: int) -> bool:
        """Whether `rank` reads samples, takes losses and steps: all do, unless one is said to do it for others."""
        coordinate = self.mesh.coordinate(rank)
        return not any(coordinate[axis] for axis in self.space.led)

    def rows_read(self, rank: int) -> list[int]:
        """The rows of the global batch that `rank` reads, micro-batch after micro-batch: those that it plays.

        A rank that leads reads those of all that it leads, in the order of the batch; they read none.
        """
        if not self.space.led:
            return [row for first in self.first_rows(self.data_index(rank)) for row in range(first, first + self.micro_batch)]
        indices = {self.data_index(peer) for peer in self.mesh.peers(rank, self.space.led)} if self.leads(rank) else ()
        return sorted(
            row for index in indices for first in self.first_rows(index) for row in range(first, first + self.micro_batch)
        )

    def as_dict(self) -> dict[str, Any]:
        """All that affects numbers, as plain values: the job, the mesh, the micro-batch, the strategies, the parameters."""
        weights = [
            [w.name, list(w.shape), list(w.visits), list(w.aliases), w.trainable, *([w.dtype] if w.dtype else [])]
            for w in self.anatomy.weights
        ]
        return {
            "job": asdict(self.job),
            "mesh": self.mesh.as_dict(),
            "micro_batch": self.micro_batch,
            "strategies": [
                {**strategy.as_dict(), **dict(more)} for strategy, more in zip(self.strategies, self.beyond, strict=True)
            ],
            "visits": list(self.anatomy.visits),
            "weights": weights,
            **({"calls": _calls(self.anatomy)} if _divides(self.space) else {}),
            **({"whole_batch": True} if self.anatomy.whole_batch else {}),
            **({"hidden": [w.name for w in self.anatomy.weights if w.hidden]} if by_role(self.job.optimizer) else {}),
            **({"values": self.anatomy.origin.digest} if self.anatomy.origin else {}),
        }

    @property
    def hash(self) -> str:
        """16 hex digits that name every choice that affects numbers."""
        said = json.dumps(_canonical(self.as_dict()), sort_keys=True, separators=(",", ":"))
        return sha256(said.encode()).hexdigest()[:16]


def _calls(anatomy: Anatomy) -> list[list[Any]]:
    """The calls of layers that can be divided: names, roles, and the numbers of the sums in which several end."""
    return [[call.name, call.role, *([call.sum] if call.sum else [])] for call in anatomy.calls]


def _divides(space: Space) -> bool:
    """Whether weights are cut along dims of theirs."""
    return any(home.cut for home in space.homes)


def _all_roles(job: Job, space: Space, strategies: tuple[Strategy, ...], micro_batch: int) -> Program:
    """What the ranks of every role do in a step: those that see `space`, and those that run other visits."""
    seen = [space.stage(index) for index in range(len(space.stages))] or [space]
    return Program(tuple(role for each in seen for role in _program(job, each, strategies, micro_batch).roles))


def _program(job: Job, space: Space, strategies: tuple[Strategy, ...], micro_batch: int) -> Program:
    """What the ranks that see `space` do in a step."""
    local = job.train.batch // space.mesh.extent(space.data_axes)
    turns = one_after_another(space.anatomy.visits, local // micro_batch)
    for strategy in strategies:
        turns = strategy.turns(turns, space)
    program = one_device(space, job, micro_batch, turns)
    for strategy in strategies:
        program = strategy.rewrite(program, space, job)
    program = among_several(brought(tied(program, space, job), space, job), space.mesh)
    return measured(program, space) if job.train.noise_scale else program


def _canonical(value: Any) -> Any:
    """`value` with whole numbers written one way: plans that hold 1 and 1.0 are equal, so their hashes are too."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
