"""Pipeline parallelism: the layers of a model on several ranks, and micro-batches that go through them one behind the other.

Why it works: a layer needs of the layers before it nothing but what they give out, and of those behind it nothing but its
gradient. So runs of layers, *parts*, can live on ranks of their own, which hold no other weight, gradient or moment. While one
micro-batch is in the second part, the next one is in the first: with many of them all ranks are busy most of the time.

    rank 0   [ embed  layer 0  layer 1 ]  -- x -->  rank 1   [ layer 2  layer 3  head ]  --> loss
                                         <- dx --

    before   COUNT                         F F F F F F  LOSS  B B B B B B                                STEP
    rank 0   COUNT  F F F SEND  F F F SEND ........  RECEIVE B B B  RECEIVE B B B               TALLY  CLIP STEP
    rank 1   COUNT  RECEIVE F F F LOSS B B B SEND  RECEIVE F F F LOSS B B B SEND                TALLY  CLIP STEP

In which order a rank goes through its parts is what the schedule says (one file each): a list of slots, in which each forward
takes what lives at the border before its part, and each backward the gradients of what it has given. A value that several later
parts use goes from each to the next that does, so no rank sends it twice; its gradient comes back the same way, and is summed
where it passes. What needs no other part's values (masks, positions) each part computes for itself. Parts that lie on the same
rank hand values over without sending.

    bytes = 2 sum over micro-batches, borders and values of numel x width        (there, and the gradient back)

A weight that several parts use is on all of their ranks: the sum of their gradients goes to each of them before anything else is
done with it. In the norm, and in a checkpoint, it counts once.

Cost: the bubble of the schedule; activations of as many micro-batches as it keeps in flight. Borders lie where the operations are
balanced best, unless `cuts` names the blocks with which parts begin.
Limits: as many parts as ranks times `chunks`, and no more than blocks; where glue reads numbers no part begins (core/borders.py).
Not there yet, and refused: weights that parts on several ranks share, slices of the stream between parts, evaluations, the guard
and the noise scale. It is given from Python (`make_plan(..., strategies=...)`); configs do not know it.
Paper: Huang et al. 2019, "GPipe", arXiv 1811.06965; Narayanan et al. 2019, "PipeDream" (SOSP), whose balanced cuts these are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from meshwright.core.borders import Borders, Part
from meshwright.core.errors import Fault, nearest
from meshwright.core.job import Job
from meshwright.core.program import Action, Program
from meshwright.core.space import Space
from meshwright.core.steps import Turn
from meshwright.core.strategy import Handler, Phase, Runtime, Strategy
from meshwright.strategies.pipeline.balance import balanced
from meshwright.strategies.pipeline.crossing import Crossing
from meshwright.strategies.pipeline.order import Costs, Order
from meshwright.strategies.pipeline.schedules import SCHEDULES, Schedule


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Puts runs of layers on the ranks along `axis`, `chunks` on each, which work in the order of `schedule`."""

    name: ClassVar[str] = "pipeline"
    phase: ClassVar[Phase] = "order"
    axis: str = "pp"
    schedule: str = "1f1b"
    chunks: int = 0
    cuts: tuple[str, ...] = ()

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.pipeline"
        if self.axis != "pp":
            yield Fault(f"layers cannot be put along '{self.axis}'", 'write axis = "pp"', f"{where}.axis")
        if self.schedule not in SCHEDULES:
            yield Fault(f"there is no schedule '{self.schedule}'", nearest(self.schedule, SCHEDULES), f"{where}.schedule")
        for wish, key in (
            (job.evaluate.asked_for, "evaluate"),
            (job.guard.action != "off", "guard.action"),
            (job.train.noise_scale, "train.noise_scale"),
        ):
            if wish:
                text = f"{key} needs forwards of the whole model, and its parts lie on several ranks"
                yield Fault(text, f"remove {key}", key)
        if self.schedule in SCHEDULES:
            yield from self._count_faults(space, SCHEDULES[self.schedule], where)
        if space.mesh.pp == 1:
            yield Fault("a pipeline of one rank", "set mesh.pp to 2 or more, or remove the strategy", "mesh.pp")
        if space.anatomy.borders is None:
            yield Fault("nothing is known of what crosses the borders between blocks", "read the model with its borders", where)
        else:
            yield from self._cut_faults(space, space.anatomy.borders, where)

    def _count_faults(self, space: Space, schedule: Schedule, where: str) -> Iterator[Fault]:
        if self.chunks < 0 or (self.chunks and schedule.chunks not in (0, self.chunks)):
            several = f"{schedule.chunks} parts" if schedule.chunks > 1 else "one part"
            text = f"chunks = {self.chunks}" + (f", and {self.schedule} has {several} per rank" if schedule.chunks else "")
            free = " or ".join(name for name, each in SCHEDULES.items() if not each.chunks)
            yield Fault(text, f"leave chunks away, or write schedule = {free}", f"{where}.chunks")
        yield from schedule.refuse(space.mesh.pp, 1)

    def _cut_faults(self, space: Space, borders: Borders, where: str) -> Iterator[Fault]:
        chunks = self._chunks
        parts, known = space.mesh.pp * chunks, len(borders.open()) + 1
        if parts > known:
            ranks = f"{space.mesh.pp} ranks" + (f" of {chunks} parts each" if chunks > 1 else "")
            text = f"{ranks} for a model that can be cut into {known} parts ({len(borders.visits)} blocks)"
            yield Fault(text, f"set mesh.pp to {known // chunks or 1} at most, or chunks lower", "mesh.pp")
        if self.cuts and len(self.cuts) != parts - 1:
            text = f"{len(self.cuts)} cuts make {len(self.cuts) + 1} parts; needed are {parts}"
            yield Fault(text, f"name {parts - 1} blocks, or none", f"{where}.cuts")
        if self.cuts:
            yield from borders.faults(self.cuts)

    def partners(self, space: Space) -> Iterator[Fault]:
        tied = [home.weight.name for home in space.homes if len(space.users(home.weight)) > 1 and home.weight.trainable]
        if tied:
            text = f"{len(tied)} parameters ({tied[0]}...) are used by parts on several ranks, and nobody adds up their gradients"
            fix = "untie them, or choose cuts that leave all their users in one part"
            yield Fault(text, fix, "strategies.pipeline.cuts")
        apart = [home.weight.name for home in space.homes if home.apart]
        if apart:
            text = f"{len(apart)} matrices ({apart[0]}...) are stepped by an owner among slices, and parts have no owners"
            yield Fault(text, 'use optimizer.name = "adamw", or leave matrices whole', "optimizer.name")
        sliced = [axis for axis in space.stream.axes("S") if space.mesh.size(axis) > 1]
        if sliced:
            text = f"the stream goes in slices along {' and '.join(sliced)}, and values travel whole between parts"
            yield Fault(text, "remove the strategy that cuts the stream, or the pipeline", "strategies.pipeline")

    def place(self, space: Space) -> Space:
        parts = self._parts(space)
        if parts is None:
            return space
        stages = sorted(SCHEDULES[self.schedule].stages(space.mesh.pp, self._chunks), key=lambda stage: stage.part)
        mine = [[stage.part for stage in stages if stage.rank == rank] for rank in range(space.mesh.pp)]
        visits = (tuple(visit for part in own for visit in parts[part].visits) for own in mine)
        return space.with_stages(visits, tuple(part.visits[0] for part in parts[1:]))

    def turns(self, turns: Sequence[Turn], space: Space) -> Sequence[Turn]:
        parts, mine = self._known(space), dict(space.coordinate)[self.axis]
        order = self.order(space, len({turn.micro for turn in turns}))
        slots = ((slot, parts[order.stages[slot.stage].part]) for slot in order.slots[mine])
        return [Turn("F" if slot.kind == "F" else "B", part.visits, slot.micro) for slot, part in slots]

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: self._crossed(actions, space, job))

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return dict.fromkeys(("SEND", "RECEIVE", "SEND_GRAD", "RECEIVE_GRAD"), runtime.cross)

    def order(self, space: Space, micros: int) -> Order:
        """Who runs which part for which of so many micro-batches, all ranks of the pipeline together."""
        anatomy = (space.whole or space).anatomy
        flops = dict(zip(anatomy.visits, anatomy.flops, strict=True))
        costs = tuple(float(sum(map(flops.__getitem__, part.visits))) for part in self._known(space))
        return _made(self.schedule, space.mesh.pp, micros, self._chunks, costs)

    @property
    def _chunks(self) -> int:
        """The parts per rank."""
        own = SCHEDULES[self.schedule].chunks if self.schedule in SCHEDULES else 1
        return max(self.chunks, 0) or own or 2

    def _crossed(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        order = self.order(space, len({action.micro for action in actions if action.kind == "F"}))
        return Crossing(self._known(space), order, space, job, self.axis).added(actions)

    def _parts(self, space: Space) -> tuple[Part, ...] | None:
        """The parts; None where they cannot be made, which `check` tells."""
        anatomy = (space.whole or space).anatomy
        borders, count = anatomy.borders, space.mesh.pp * self._chunks
        if borders is None or self.schedule not in SCHEDULES or count < 2 or count > len(borders.open()) + 1:
            return None
        if self.cuts and (len(self.cuts) != count - 1 or list(borders.faults(self.cuts))):
            return None
        return borders.parts(self.cuts or balanced(dict(zip(anatomy.visits, anatomy.flops, strict=True)), borders.open(), count))

    def _known(self, space: Space) -> tuple[Part, ...]:
        parts = self._parts(space)
        if parts is None:
            raise ValueError("a plan was made although its pipeline has faults")
        return parts


@lru_cache(maxsize=32)
def _made(schedule: str, ranks: int, micros: int, chunks: int, costs: tuple[float, ...]) -> Order:
    """The lists of a schedule, which are asked for once per rank."""
    return SCHEDULES[schedule].make(ranks, micros, chunks, Costs(costs, costs, costs))
