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

from meshwright.core.anatomy import Anatomy
from meshwright.core.errors import Fault, raise_faults
from meshwright.core.job import Job, Optimizer
from meshwright.core.mesh import AXES, Mesh
from meshwright.core.noise import measured, noise_faults
from meshwright.core.owners import brought
from meshwright.core.program import Program
from meshwright.core.rules import by_role, grain_of
from meshwright.core.run import Run
from meshwright.core.space import Space
from meshwright.core.steps import one_device
from meshwright.core.strategy import Strategy, in_phase_order


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
        faults = [*job.faults(), *run.faults(), *_choice_faults(ordered), *_model_faults(anatomy)]
        for strategy in ordered:
            faults += strategy.check(job, space)
            space = strategy.place(space)
        faults += [fault for strategy in ordered for fault in strategy.partners(space)]
        space = space.with_homes(lambda home: replace(home, grain="matrix") if home.apart else home)
        faults += [*_space_faults(space, ordered), *_precision_faults(job, space)]
        faults += [*_batch_faults(job, space, micro_batch), *_whole_faults(job, space, micro_batch)]
        faults += noise_faults(job, space, micro_batch)
        raise_faults(faults)
        micro_batch = micro_batch or job.train.batch // mesh.extent(space.data_axes)
        space = space.at(mesh.coordinate(0))
        return cls(job, run, mesh, micro_batch, ordered, space, _program(job, space, ordered, micro_batch))

    def at(self, rank: int) -> "Plan":
        """This plan as `rank` plays it: where ranks have slices of several sizes, with its own in space and program."""
        space = self.space.at(self.mesh.coordinate(rank))
        if space.homes == self.space.homes:
            return replace(self, space=space)
        return replace(self, space=space, program=_program(self.job, space, self.strategies, self.micro_batch))

    @property
    def anatomy(self) -> Anatomy:
        """The model, as the plan sees it."""
        return self.space.anatomy

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

    def data_index(self, rank: int) -> int:
        """Which of the `num_data` shares of the samples `rank` plays."""
        index, coordinate = 0, self.mesh.coordinate(rank)
        for axis in self.space.data_axes:
            index = index * self.mesh.size(axis) + coordinate[axis]
        return index

    def first_rows(self, index: int) -> list[int]:
        """Where the rows of data share `index` begin in the global batch, one start per micro-batch."""
        return [(micro * self.num_data + index) * self.micro_batch for micro in range(self.num_micro)]

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
            "strategies": [strategy.as_dict() for strategy in self.strategies],
            "visits": list(self.anatomy.visits),
            "weights": weights,
            **({"calls": [[each.name, each.role] for each in self.anatomy.calls]} if _divides(self.space) else {}),
            **({"whole_batch": True} if self.anatomy.whole_batch else {}),
            **({"hidden": [w.name for w in self.anatomy.weights if w.hidden]} if by_role(self.job.optimizer) else {}),
            **({"values": self.anatomy.origin.digest} if self.anatomy.origin else {}),
        }

    @property
    def hash(self) -> str:
        """16 hex digits that name every choice that affects numbers."""
        said = json.dumps(_canonical(self.as_dict()), sort_keys=True, separators=(",", ":"))
        return sha256(said.encode()).hexdigest()[:16]


def _divides(space: Space) -> bool:
    """Whether weights are cut along dims of theirs."""
    return any(home.cut for home in space.homes)


def _program(job: Job, space: Space, strategies: tuple[Strategy, ...], micro_batch: int) -> Program:
    """What the ranks that see `space` do in a step."""
    local = job.train.batch // space.mesh.extent(space.data_axes)
    program = one_device(space, job, micro_batch, local // micro_batch)
    for strategy in strategies:
        program = strategy.rewrite(program, space, job)
    program = brought(program, space, job)
    return measured(program, space) if job.train.noise_scale else program


def _canonical(value: Any) -> Any:
    """`value` with whole numbers written one way: plans that hold 1 and 1.0 are equal, so their hashes are too."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _model_faults(anatomy: Anatomy) -> Iterator[Fault]:
    if not anatomy.trainable:
        text = f"none of the {len(anatomy.weights)} parameters of {anatomy.name} is trained"
        yield Fault(text, "leave requires_grad set on those that shall be trained", "model")


def _choice_faults(strategies: tuple[Strategy, ...]) -> Iterator[Fault]:
    order = [strategy.name for strategy in strategies if strategy.phase == "order"]
    if len(order) > 1:
        yield Fault(f"{' and '.join(order)} both decide the order of the step", "keep one of them", "strategies")
    stores: dict[str, list[str]] = {}
    for strategy in dict.fromkeys(strategies):
        if strategy.phase == "store":
            stores.setdefault(strategy.as_dict().get("axis", ""), []).append(strategy.name)
    for axis, names in stores.items():
        if len(names) > 1:
            yield Fault(
                f"{' and '.join(names)} both decide how weights are stored along {axis}", "keep one of them", "strategies"
            )
    for name in sorted({str(strategy) for strategy in strategies if strategies.count(strategy) > 1}):
        yield Fault(f"{name} stands twice in the list", "remove one", "strategies")


def _space_faults(space: Space, strategies: tuple[Strategy, ...]) -> Iterator[Fault]:
    pending = list(space.unreduced())
    if pending:
        axes = ", ".join(sorted({axis for home in pending for axis in home.grad.axes("P")}))
        text = f"the gradients of {len(pending)} parameters ({pending[0].weight.name}...) stay pending sums over {axes}"
        fix = f'add a strategy that stores weights along {axes}: [[strategies]] name = "replicate"'
        if any(home.flat for home in pending):  # who cuts them into shards must hand those out along other axes too
            fix = f'have the shards copied along {axes}: across = "{axes}" in the strategy that makes them'
        yield Fault(text, fix, "strategies")
    meant = {strategy.as_dict().get("axis", "") for strategy in strategies}  # one that cannot use its axis says why itself
    idle = [axis for axis in AXES if space.mesh.size(axis) > 1 and axis not in meant and not _used(space, axis)]
    if idle:
        ranks = " x ".join(str(space.mesh.size(axis)) for axis in idle)
        text = f"no strategy uses the axis {' and '.join(idle)}: {ranks} ranks would do the same work"
        yield Fault(
            text, 'give the axis a strategy (for data parallelism: "batch" and "replicate"), or set its size to 1', "strategies"
        )


def _precision_faults(job: Job, space: Space) -> Iterator[Fault]:
    """Sums are kept in a dtype of their own only where they are shards; elsewhere they stay where backward leaves them."""
    roles = job.precision.resolved
    whole = [home for home in space.homes if home.weight.trainable and not home.flat]
    if whole and roles.gradients != roles.parameters:
        which = f"those of {len(whole)} parameters ({whole[0].weight.name}...)"
        text = f"gradients in {roles.gradients}, and {which} are not cut into shards: they stay in {roles.parameters}"
        yield Fault(text, "remove precision.gradients, or cut weights into shards over several ranks", "precision.gradients")
    if space.led and roles.scales_loss:
        text = "the loss is scaled for float16, and one rank alone would know of an overflow: it steps for the others"
        yield Fault(text, 'use compute = "bfloat16"', "precision.compute")


def _used(space: Space, axis: str) -> bool:
    layouts = [space.tokens, *(home.layout for home in space.homes)]
    return any(axis in dict(layout.places) for layout in layouts)


def _batch_faults(job: Job, space: Space, micro_batch: int) -> Iterator[Fault]:
    num_data, batch = space.mesh.extent(space.data_axes), job.train.batch
    if micro_batch < 0:
        yield Fault(
            f"micro_batch = {micro_batch}",
            "write the samples per micro-batch and rank, or 0 for all of them at once",
            "micro_batch",
        )
    elif 0 < batch < num_data:
        text = f"a global batch of {batch} samples is too small for {num_data} data-parallel ranks"
        yield Fault(text, f"raise train.batch to at least {num_data}, or use fewer ranks", "train.batch")
    elif batch > 0 and batch % num_data:
        text = f"a global batch of {batch} samples does not divide by {num_data} data-parallel ranks"
        lower = batch - batch % num_data
        yield Fault(text, f"set train.batch to {lower} or {lower + num_data}, or change the mesh", "train.batch")
    elif batch > 0 and micro_batch and (batch // num_data) % micro_batch:
        local = batch // num_data
        divisors = [n for n in range(1, local + 1) if local % n == 0]
        text = f"the {local} samples of a rank ({batch} over {num_data} ranks) do not divide by micro_batch = {micro_batch}"
        yield Fault(text, f"choose micro_batch from {', '.join(map(str, divisors[:12]))}", "micro_batch")


def _whole_faults(job: Job, space: Space, micro_batch: int) -> Iterator[Fault]:
    """A loss of the whole batch, or one rank that takes it for others, needs all outputs at once."""
    local = job.train.batch // space.mesh.extent(space.data_axes)
    if 0 < micro_batch < local and (space.anatomy.whole_batch or space.led):
        who = "the loss is taken" if space.led else "the loss is no sum over samples: it is taken"
        text = f"{who} on the whole global batch at once, and micro_batch = {micro_batch} cuts a rank's {local} samples"
        yield Fault(text, "set micro_batch = 0, and lower train.batch if that does not fit", "micro_batch")
    if job.guard.action != "off" and (space.anatomy.whole_batch or space.led):
        text = "the guard looks for the rank that spoiled a step, and here no rank has a loss of its own"
        yield Fault(text, 'set guard.action = "off"', "guard.action")
    used = [column for column in space.anatomy.outputs if column.used]
    if space.anatomy.whole_batch and not used:
        text = "the loss of the whole batch takes none of the model's outputs"
        yield Fault(text, "compute it from the tensors that the forward returns", "loss")
