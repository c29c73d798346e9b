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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from meshwright.core.borders import Borders, Part, Value
from meshwright.core.errors import Fault, nearest
from meshwright.core.job import Job
from meshwright.core.program import Action, Hold, Program, Transfer, with_waits
from meshwright.core.space import Space
from meshwright.core.steps import COUNT_NBYTES, Turn, micro_rows, role_of
from meshwright.core.strategy import Handler, Phase, Runtime, Strategy
from meshwright.strategies.pipeline import gpipe, interleaved, model_parallel, one_f_one_b
from meshwright.strategies.pipeline.balance import balanced
from meshwright.strategies.pipeline.order import Order

Make = Callable[[int, int, int], Order]  # of ranks, micro-batches and parts per rank
SCHEDULES: Mapping[str, Make] = MappingProxyType(
    {
        "model_parallel": lambda ranks, micros, chunks: model_parallel.order(ranks, micros),
        "gpipe": lambda ranks, micros, chunks: gpipe.order(ranks, micros),
        "1f1b": lambda ranks, micros, chunks: one_f_one_b.order(ranks, micros),
        "interleaved": interleaved.order,
    }
)
CHUNKED = ("interleaved",)
NBYTES = {"COUNT": COUNT_NBYTES, "TALLY": 8}  # the loss: float64


@dataclass(frozen=True)
class Hop:
    """A value goes from one part to the next that uses it; its gradient comes back."""

    value: Value
    source: int
    target: int

    def subject(self, *, back: bool) -> str:
        """What its actions are about."""
        return f"{self.value.name} of {self.target} to {self.source}" if back else f"{self.value.name} to {self.target}"


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Puts runs of layers on the ranks along `axis`, `chunks` on each, which work in the order of `schedule`."""

    name: ClassVar[str] = "pipeline"
    phase: ClassVar[Phase] = "order"
    axis: str = "pp"
    schedule: str = "1f1b"
    chunks: int = 1
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
        if self.schedule in SCHEDULES and (self.chunks < 1 or (self.chunks > 1 and self.schedule not in CHUNKED)):
            text = f"chunks = {self.chunks}, and {self.schedule} has one part per rank"
            yield Fault(text, f"write chunks = 1, or schedule = {' or '.join(CHUNKED)}", f"{where}.chunks")
        if space.mesh.pp == 1:
            yield Fault("a pipeline of one rank", "set mesh.pp to 2 or more, or remove the strategy", "mesh.pp")
        if space.anatomy.borders is None:
            yield Fault("nothing is known of what crosses the borders between blocks", "read the model with its borders", where)
        else:
            yield from self._cut_faults(space, space.anatomy.borders, where)

    def _cut_faults(self, space: Space, borders: Borders, where: str) -> Iterator[Fault]:
        parts, known = space.mesh.pp * self.chunks, len(borders.open()) + 1
        if parts > known:
            ranks = f"{space.mesh.pp} ranks" + (f" of {self.chunks} parts each" if self.chunks > 1 else "")
            text = f"{ranks} for a model that can be cut into {known} parts ({len(borders.visits)} blocks)"
            yield Fault(text, f"set mesh.pp to {known // self.chunks or 1} at most, or chunks lower", "mesh.pp")
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
        found: list[list[str]] = [[] for _ in range(space.mesh.pp)]
        for number, rank in sorted(self.where(space).items()):
            found[rank] += parts[number].visits
        return space.with_stages(map(tuple, found), tuple(part.visits[0] for part in parts[1:]))

    def turns(self, turns: Sequence[Turn], space: Space) -> Sequence[Turn]:
        parts, mine = self._known(space), dict(space.coordinate)[self.axis]
        order = self._order(space.mesh.pp, len({turn.micro for turn in turns}))
        slots = ((slot, parts[order.stages[slot.stage].part]) for slot in order.slots[mine])
        return [Turn("F" if slot.kind == "F" else "B", part.visits, slot.micro) for slot, part in slots]

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(_Crossing(self, space, job).added)

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return dict.fromkeys(("SEND", "RECEIVE", "SEND_GRAD", "RECEIVE_GRAD"), runtime.cross)

    def _order(self, ranks: int, micros: int) -> Order:
        return SCHEDULES[self.schedule](ranks, micros, self.chunks)

    def _parts(self, space: Space) -> tuple[Part, ...] | None:
        """The parts; None where they cannot be made, which `check` tells."""
        anatomy = (space.whole or space).anatomy
        borders, count = anatomy.borders, space.mesh.pp * self.chunks
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

    def where(self, space: Space) -> dict[int, int]:
        """The rank along pp of each part."""
        return {stage.part: stage.rank for stage in self._order(space.mesh.pp, space.mesh.pp).stages}

    def hops(self, space: Space) -> Iterator[Hop]:
        """How every value goes from part to part."""
        parts = self._known(space)
        of = {visit: number for number, part in enumerate(parts) for visit in part.visits}
        for value in (value for part in parts for value in part.gives):
            using = sorted({of[visit] for visit in value.used} - {of[value.made]})
            yield from (Hop(value, source, target) for source, target in zip((of[value.made], *using), using, strict=False))


class _Crossing:
    """What a rank sends and receives, in its list."""

    def __init__(self, pipeline: Pipeline, space: Space, job: Job) -> None:
        self._space, self._job, self._axis = space, job, pipeline.axis
        self._where = pipeline.where(space)
        self._parts = pipeline._known(space)
        self._hops = [hop for hop in pipeline.hops(space) if self._where[hop.source] != self._where[hop.target]]

    def added(self, actions: list[Action]) -> list[Action]:
        """`actions` with what is received before each run of a part, and sent behind it."""
        rows, done = micro_rows(actions, self._space, self._job), list[Action]()
        first = {part.visits[0]: number for number, part in enumerate(self._parts)}
        last = {part.visits[-1]: number for number, part in enumerate(self._parts)}
        for action in map(self._told, actions):
            back = action.kind == "B"
            begins, ends = (last, first) if back else (first, last)
            crosses = action.kind in ("F", "B")
            if crosses and action.subject in begins:
                arriving = list(self._received(begins[action.subject], action, rows, back=back))
                done += arriving
                action = with_waits(action, (each.name for each in arriving))
                action = replace(action, frees=(*action.frees, *(each.name for each in arriving if back)))
            if back and action.subject in ends:
                held = (hop.subject(back=False) for hop in self._hops if hop.target == ends[action.subject])
                action = replace(action, frees=(*action.frees, *(f"RECEIVE({name}, {action.micro})" for name in held)))
            done.append(action)
            if crosses and action.subject in ends:
                done += self._sent(ends[action.subject], action, rows, back=back)
        return done

    def _told(self, action: Action) -> Action:
        """`action`; COUNT and TALLY along the axis too: all hear of a wish to stop, and of the loss that the last part takes."""
        if action.kind not in NBYTES:
            return action
        axes = action.transfer.axes if action.transfer else ()
        move = Transfer("all_reduce", (*axes, self._axis), NBYTES[action.kind], dtype="float64")
        return replace(action, lane="wire", transfer=move)

    def _received(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[Action]:
        for hop in self._hops:
            mine, other = (hop.source, hop.target) if back else (hop.target, hop.source)
            if mine == part and (hop.value.needed or not back):
                name, nbytes = hop.subject(back=back), hop.value.nbytes(rows)
                kind, sent = ("RECEIVE_GRAD", "SEND_GRAD") if back else ("RECEIVE", "SEND")
                waits = (f"{role_of({'pp': self._where[other]})}/{sent}({name}, {action.micro})",)
                transfer = self._transfer("receive", hop, other, rows)
                received = Action(kind, name, action.micro, "receive", waits, (hop.value.name,), transfer)
                yield replace(received, takes=(Hold(received.name, nbytes),))

    def _sent(self, part: int, action: Action, rows: int, *, back: bool) -> Iterator[Action]:
        for hop in self._hops:
            mine, other = (hop.target, hop.source) if back else (hop.source, hop.target)
            if mine == part and (hop.value.needed or not back):
                kind, name = "SEND_GRAD" if back else "SEND", hop.subject(back=back)
                transfer = self._transfer("send", hop, other, rows)
                yield Action(kind, name, action.micro, "send", (action.name,), (hop.value.name,), transfer)

    def _transfer(self, collective: str, hop: Hop, other: int, rows: int) -> Transfer:
        value = hop.value
        return Transfer(collective, (self._axis,), value.nbytes(rows), dtype=value.dtype, peer=self._where[other])
