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

Where a schedule has halves of backwards, I gives the gradients that other parts wait for, and W, any time later, those of weights
(model/halves.py). `schedule` is a name, "automatic" (a search, for parts that are not alike), or a file of one's own (given.py).

A weight that several parts use, such as a tied table of words, is on all of their ranks, and so is each weight where a schedule
has every part on two: the sum of their gradients goes to each of them before anything else is done with it (TIE, core/ties.py).
In the norm, and in a checkpoint, it counts once. The sum comes when the last backward is over, and nothing hides it.

    bytes = 2 (k - 1)/k S        sent by each of k ranks that use S bytes of weights; of S in shards, a shard

Where ranks of a part have slices of a value (tokens, with sequence.py or where those of a sample are dealt to ranks; the width,
with grids; heads), each sends its own to the rank at its place in the next part, and nobody puts it together in between
(core/crossed.py); of such tokens glue sees what it would on one device (model/apart.py). Where they all have the same (line.py),
every rank sends all of it, over a link of its own; with `scatter` each sends one t-th, and the next part gathers:

    bytes between parts, per rank    N whole     N/t in slices     N/t with `scatter`, and (t-1)/t N received within the part

That is worth it where links between parts are slower than those within: parts on other hosts. What ranks that own whole matrices
(Muon beside slices) step is of their own part (core/owners.py).

Evaluations go through the same parts, micro-batch close behind micro-batch (engine/relay.py). Any other forward, `generate` with
its cache too, is run by all ranks abreast inside `engine.whole()`, each block where its weights are (engine/abreast.py). The
guard plays a harmful step again part by part. The noise scale is refused where several parts use a weight.

Cost: the bubble of the schedule; activations of as many micro-batches as it keeps in flight. Borders lie where the operations are
balanced best, unless `cuts` names the blocks with which parts begin.
Limits: as many parts as ranks times `chunks`, and no more than blocks; where glue reads numbers no part begins (core/borders.py).
A value of which nobody can tell what a rank has is refused by name, with the cut; what a forward gives out in another shape or
dtype than in its trial (learnt with the casts of a CPU) is not sent.
Paper: Huang et al. 2019, "GPipe", arXiv 1811.06965; Narayanan et al. 2019, "PipeDream" (SOSP), whose balanced cuts these are.

Where to cut a model into parts: such that the most costly part costs as little as can be.

    costs   embed 0 | layer 5 | layer 5 | layer 5 | layer 5 | head 9        3 parts: 10 | 10 | 9
    most(k, j) = min over i of max(most(k - 1, i), cost of the visits from i to j)

Cost: parts x borders^2 steps on paper. Of several cuts with the same most costly part the one with the earliest borders is taken.
Limits: what a part costs is the sum of its visits, whatever crosses its borders.
Paper: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP), section 3.1.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

from meshwright.parallel.pipeline.schedules.custom import digest, is_source
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES, Schedule, schedule_of
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, Stage
from meshwright.parallel.pipeline.send_recv import Crossing, Routes
from meshwright.plan.job.errors import Fault, PlanError, nearest
from meshwright.plan.job.job import Job
from meshwright.plan.model_spec.stage_boundaries import Borders, Part
from meshwright.plan.sharding.rank_share import weight_flops
from meshwright.plan.sharding.sharding_plan import Space
from meshwright.plan.sharding.stage_values import Crossed, crossed_faults
from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.single_device import Turn
from meshwright.plan.strategy import Handler, Phase, Runtime, Strategy


def balanced(costs: Mapping[str, float], opened: Sequence[str], count: int) -> tuple[str, ...]:
    """The visits, of `opened`, with which the second and later ones of `count` parts begin; `costs` are in order of the forward.

    There must be `count - 1` open borders at least.
    """
    visits = list(costs)
    before = [0.0, *accumulate(costs.values())]
    starts = [0, *(visits.index(visit) for visit in opened), len(visits)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (before[end], ()) for end in starts[1:]}
    for parts in range(2, count + 1):
        ends = starts[parts:]
        best = {end: min(_last(best, start, before[end] - before[start]) for start in best if start < end) for end in ends}
    return tuple(visits[at] for at in best[len(visits)][1])


def _last(best: Mapping[int, tuple[float, tuple[int, ...]]], start: int, cost: float) -> tuple[float, tuple[int, ...]]:
    most, cuts = best[start]
    return max(most, cost), (*cuts, start)


@dataclass(frozen=True)
class Pipeline(Strategy):
    """Puts runs of layers on the ranks along `axis`, `chunks` on each, which work in the order of `schedule`.

    With `scatter`, of a value that several ranks of a part have alike each sends a piece, and the next part puts them together.
    """

    name: ClassVar[str] = "pipeline"
    phase: ClassVar[Phase] = "order"
    axis: str = "pp"
    schedule: str = "1f1b"
    chunks: int = 0
    cuts: tuple[str, ...] = ()
    scatter: bool = False

    def check(self, job: Job, space: Space) -> Iterator[Fault]:
        where = "strategies.pipeline"
        if self.axis != "pp":
            yield Fault(f"layers cannot be put along '{self.axis}'", 'write axis = "pp"', f"{where}.axis")
        schedule = schedule_of(self.schedule)
        if schedule is None:
            yield Fault(f"there is no schedule '{self.schedule}'", nearest(self.schedule, SCHEDULES), f"{where}.schedule")
        if schedule is not None:
            yield from self._count_faults(space, schedule, where)
        if space.mesh.pp == 1:
            yield Fault("a pipeline of one rank", "set mesh.pp to 2 or more, or remove the strategy", "mesh.pp")
        elif space.anatomy.borders is None:
            yield Fault("nothing is known of what crosses the borders between blocks", "read the model with its borders", where)
        else:
            yield from self._cut_faults(space, space.anatomy.borders, where)

    def _count_faults(self, space: Space, schedule: Schedule, where: str) -> Iterator[Fault]:
        if self.chunks < 0 or (self.chunks and schedule.chunks not in (0, self.chunks)):
            several = f"{schedule.chunks} parts" if schedule.chunks > 1 else "one part"
            text = f"chunks = {self.chunks}" + (f", and {self.schedule} has {several} per rank" if schedule.chunks else "")
            free = " or ".join(f'"{name}"' for name, each in SCHEDULES.items() if not each.chunks)
            yield Fault(text, f"leave chunks away, or write schedule = {free}", f"{where}.chunks")
        yield from schedule.refuse(space.mesh.pp, 1)

    def _cut_faults(self, space: Space, borders: Borders, where: str) -> Iterator[Fault]:
        chunks, parts, known = self._chunks, self._count(space), len(borders.open()) + 1
        if (parts or space.mesh.pp) > known:
            ranks = f"{space.mesh.pp} ranks" + (f" of {chunks} parts each" if chunks > 1 else "")
            text = f"{ranks} for a model that can be cut into {known} parts ({len(borders.visits)} blocks)"
            text += "".join(f"; none can begin with '{each.visit}': {each.why}" for each in borders.closed[:1])
            fix = self._fewer(space.mesh.pp, known)
            fix += "".join(f"; or {each.fix}" for each in borders.closed[:1])
            yield Fault(text, fix + (_declaring(space) if len(borders.visits) == 1 else ""), "mesh.pp")
        if self.cuts and parts and len(self.cuts) != parts - 1:
            text = f"{len(self.cuts)} cuts make {len(self.cuts) + 1} parts; needed are {parts}"
            yield Fault(text, f"name {parts - 1} block{'s' * (parts > 2)}, or none", f"{where}.cuts")
        if self.cuts:
            yield from (replace(fault, where=f"{where}.cuts") for fault in borders.faults(self.cuts))

    def _fewer(self, ranks: int, known: int) -> str:
        """What makes fewer parts than `known` of them, in words."""
        chunks, found = self._chunks, schedule_of(self.schedule)
        ways = [f"set mesh.pp to {known // chunks} at most"] if known >= 2 * chunks else []
        if chunks > 1 and known >= ranks:
            free = found is not None and not found.chunks and not found.source
            ways.append(f"set chunks to {known // ranks} at most" if free else 'take a schedule of one part per rank, as "1f1b"')
        return ", or ".join(ways) or "set mesh.pp to 1, and remove the strategy"

    def partners(self, space: Space) -> Iterator[Fault]:
        yield from self._crossing_faults(space)

    def _crossing_faults(self, space: Space) -> Iterator[Fault]:
        """Values of which nobody knows what a rank has, and a wish to send pieces where each rank has something else to send."""
        values = [value for part in self._parts(space) or () for value in part.gives]
        yield from crossed_faults(space, values)
        if self.scatter and not any(map(Crossed(space, values).alike, values)):
            text = "scatter = true, and no several ranks have the same to send: values go in slices already, or no weight does"
            yield Fault(text, "leave scatter away", "strategies.pipeline.scatter")

    def place(self, space: Space) -> Space:
        parts = self._parts(space)
        if parts is None:
            return space
        stages = sorted(self._stages(space), key=lambda stage: stage.part)
        mine = [[stage.part for stage in stages if stage.rank == rank] for rank in range(space.mesh.pp)]
        visits = (tuple(visit for part in own for visit in parts[part].visits) for own in mine)
        return space.with_stages(visits, tuple(part.visits[0] for part in parts[1:]))

    def turns(self, turns: Sequence[Turn], space: Space) -> Sequence[Turn]:
        parts, mine = self._known(space), dict(space.coordinate)[self.axis]
        order = self.order(space, len({turn.micro for turn in turns}))
        slots = ((slot, parts[order.stages[slot.stage].part]) for slot in order.slots[mine])
        return [Turn(slot.kind, part.visits, slot.micro) for slot, part in slots]

    def rewrite(self, program: Program, space: Space, job: Job) -> Program:
        return program.edit(lambda actions: self._crossed(actions, space, job))

    def beyond(self) -> tuple[tuple[str, str], ...]:
        return (("file", self._file),) if self._file else ()

    def bind(self, runtime: Runtime) -> Mapping[str, Handler]:
        return dict.fromkeys(("SEND", "RECEIVE", "JOIN", "SEND_GRAD", "RECEIVE_GRAD", "JOIN_GRAD"), runtime.cross)

    def order(self, space: Space, micros: int) -> Order:
        """Who runs which part for which of so many micro-batches, all ranks of the pipeline together."""
        asked = self._asked(space, micros)
        made, idle = _made(asked), _idle(asked)
        if made.stages != self._stages(space):
            text = f"{self.schedule} puts parts on other ranks for {micros} micro-batches than for {space.mesh.pp}"
            raise PlanError(text, fix="have it put them on the same ones for any number", where="strategies.pipeline.schedule")
        if idle:
            part, rank = idle[0]
            text = f"{self.schedule} has no micro-batch for part {part} on rank {rank} of the pipeline, but {micros} in all"
            raise PlanError(text, fix="make more of them: a smaller micro_batch", where="micro_batch")
        return made

    def _asked(self, space: Space, micros: int) -> "_Asked":
        anatomy, known = (space.whole or space).anatomy, self._known(space)
        forward, weights = (_sums(anatomy.visits, flops, known) for flops in (anatomy.flops, weight_flops(anatomy)))
        return _Asked(self.schedule, self._file, space.mesh.pp, micros, self._chunks, forward, weights)

    @property
    def _file(self) -> str:
        """What names the contents of the file that says the schedule; nothing for one with a name."""
        return digest(self.schedule) if is_source(self.schedule) else ""

    @property
    def _chunks(self) -> int:
        """The parts per rank."""
        found = schedule_of(self.schedule)
        return max(self.chunks, 0) or (1 if found is None else found.chunks or found.usual)

    def _stages(self, space: Space) -> tuple[Stage, ...]:
        """Where the parts lie; nothing where that cannot be told, which `check` says."""
        return _lying(self.schedule, self._file, space.mesh.pp, self._chunks)

    def _count(self, space: Space) -> int:
        """How many parts there are; 0 where that cannot be told."""
        return len({stage.part for stage in self._stages(space)})

    def _crossed(self, actions: list[Action], space: Space, job: Job) -> list[Action]:
        asked, parts = self._asked(space, len({action.micro for action in actions if action.kind == "F"})), self._known(space)
        return Crossing(parts, _routed(parts, asked), space, job, self.axis, scatter=self.scatter).added(actions)

    def _parts(self, space: Space) -> tuple[Part, ...] | None:
        """The parts; None where they cannot be made, which `check` tells."""
        anatomy = (space.whole or space).anatomy
        borders, count = anatomy.borders, self._count(space)
        if borders is None or count < 2 or count > len(borders.open()) + 1:
            return None
        if self.cuts and (len(self.cuts) != count - 1 or list(borders.faults(self.cuts))):
            return None
        if space.cuts:
            return _cut(borders, space.cuts)
        return _cut(borders, self.cuts or balanced(dict(zip(anatomy.visits, anatomy.flops, strict=True)), borders.open(), count))

    def _known(self, space: Space) -> tuple[Part, ...]:
        parts = self._parts(space)
        if parts is None:
            raise ValueError("a plan was made although its pipeline has faults")
        return parts


def _sums(visits: Sequence[str], each: Sequence[int], parts: Sequence[Part]) -> tuple[float, ...]:
    """What each of `parts` has of a number that each visit has."""
    of = dict(zip(visits, each, strict=True))
    return tuple(float(sum(map(of.__getitem__, part.visits))) for part in parts)


class _Asked(NamedTuple):
    """What the lists of a schedule follow from; `file` changes where a file gives other ones.

    What parts cost is the operations of their forwards, and those for their weights' gradients; a backward has two of a forward.
    """

    schedule: str
    file: str
    ranks: int
    micros: int
    chunks: int
    forward: tuple[float, ...]
    weights: tuple[float, ...]


def _declaring(space: Space) -> str:
    """How a model that is one block is told of more: the modules that hold its weights."""
    holders = list(dict.fromkeys(weight.name.rpartition(".")[0] for weight in (space.whole or space).anatomy.weights))
    return f"; or declare blocks: Model(..., blocks={[name for name in holders if name][:4]})"


@lru_cache(maxsize=32)
def _made(asked: _Asked) -> Order:
    """The lists of a schedule, which are asked for once per rank."""
    found, forward = schedule_of(asked.schedule), asked.forward
    if found is None:
        raise ValueError("a plan was made although its pipeline has faults")
    if not any(forward):  # nobody has counted
        return found.make(asked.ranks, asked.micros, asked.chunks, Costs.equal(len(forward)))
    inputs = [2 * whole - half for whole, half in zip(forward, asked.weights, strict=True)]
    return found.make(asked.ranks, asked.micros, asked.chunks, Costs(forward, inputs, asked.weights))


@lru_cache(maxsize=32)
def _idle(asked: _Asked) -> tuple[Stage, ...]:
    """The stages of them that do nothing."""
    made = _made(asked)
    busy = {slot.stage for slots in made.slots for slot in slots}
    return tuple(stage for number, stage in enumerate(made.stages) if number not in busy)


@lru_cache(maxsize=8)
def _routed(parts: tuple[Part, ...], asked: _Asked) -> Routes:
    """The ways of values between these parts, likewise."""
    return Routes(parts, _made(asked))


@lru_cache(maxsize=8)
def _cut(borders: Borders, cuts: tuple[str, ...]) -> tuple[Part, ...]:
    """The parts that begin with `cuts`, likewise."""
    return borders.parts(cuts)


@lru_cache(maxsize=32)
def _lying(schedule: str, file: str, ranks: int, chunks: int) -> tuple[Stage, ...]:
    """Where the parts of a schedule lie, likewise; nothing where it refuses."""
    found = schedule_of(schedule)
    return () if found is None or list(found.refuse(ranks, 1)) else found.stages(ranks, chunks)
