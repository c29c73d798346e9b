"""Which layout is best: of all that a machine allows, those that fit, in order of the seconds that a step takes.

    for every mesh      tp on a host, pp up to the layers, cp where a row is long, dp the rest; who exchanges tokens for heads
    micro-batches       every divisor of a copy's rows
    and what lies over  shares of states 0 .. 3, among all copies or those of some hosts; what is rerun; orders along pp

Two bounds keep this short, and neither can lose the best: a mesh of which nothing fits with one row at a time fits with no more;
and what a mesh computes and sends within its layers at a micro-batch size is less than any of its steps takes: where that is more
than the worst that is kept, the rest is not looked at. What a layer takes is counted once for all that lies over a mesh.

Layouts that differ in nothing that anybody would see (shares of other states, in as many seconds and as much memory) are kept
once. Layouts are sketched (planner/sketch.py); the one that is chosen is made a plan, whose program is priced action by action.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from meshwright.core.errors import Fault
from meshwright.core.mesh import divisors
from meshwright.planner.footprint import Footprint, footprint
from meshwright.planner.layout import Layout, Order
from meshwright.planner.sketch import Parts, Step, parts, step
from meshwright.planner.wish import Wish

CHUNKS = (2, 4, 8)  # of layers per rank along pp, where an order takes any number
HOSTS = (1, 4, 16)  # whose copies share states among themselves, where these lie in shards


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, the name of its order, the seconds of a step and the bytes of the fullest rank.

    `dealt`: where devices are unlike, the kind of device and the layers of each rank along pp.
    """

    layout: Layout
    schedule: str
    step: Step
    footprint: Footprint
    dealt: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step.seconds

    @property
    def seen(self) -> tuple[object, ...]:
        """What anybody sees of it: two that are alike in this are shown once."""
        alike = replace(self.layout, shards=0, within=0)
        return alike, self.schedule, self.dealt, f"{self.seconds:.3g}", f"{self.footprint.total / 2**30:.1f}"


@dataclass(frozen=True)
class Found:
    """The best candidates, the best one first; how many layouts were `seen`, and of those that do not fit the `nearest`."""

    best: tuple[Candidate, ...]
    seen: int
    nearest: tuple[Layout, Footprint] | None


class Best:
    """The `keep` best candidates so far, of those that are alike the first."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.kept: list[Candidate] = []

    @property
    def worst(self) -> float:
        """Seconds that a candidate has to stay below."""
        return self.kept[-1].seconds if len(self.kept) == self.keep else inf

    def add(self, found: Candidate) -> None:
        """Keep it, where it is one of the best."""
        twin = next((each for each in self.kept if each.seen == found.seen), None)
        if twin is not None and _rank(twin) <= _rank(found):
            return
        if twin is not None:
            self.kept.remove(twin)
        insort(self.kept, found, key=_rank)
        del self.kept[self.keep :]


def _rank(found: Candidate) -> tuple[float, float]:
    return found.seconds, found.footprint.total


def search(wish: Wish, keep: int = 10, *, prune: bool = True) -> Found:
    """The `keep` best layouts of `wish`. With `prune` False all are sketched: slow, and the same."""
    best, seen, known = Best(keep), 0, dict[tuple[float, ...], Parts]()
    nearest: tuple[Layout, Footprint] | None = None
    shape, machine = wish.shape, wish.machine
    for mesh in meshes(wish):
        if not may_fit(wish, mesh):
            if not best.kept:
                nearest = min(filter(None, (nearest, _smallest(wish, mesh))), key=lambda each: each[1].total)
            if prune:
                continue
        for sized in batches(wish, mesh):
            if prune and not may_fit(wish, sized):
                break  # more rows hold more
            key = sized.tp, sized.cp, sized.swaps, sized.apart, sized.micro_batch
            made = known[key] = known.get(key) or parts(shape, sized, machine)
            if prune and _least(wish, sized, made) > best.worst:
                continue
            for layout, schedule in over(wish, sized):
                seen += 1
                taken = step(shape, layout, machine, made)
                if taken.seconds >= best.worst:
                    continue
                held = footprint(shape, layout)
                if held.total <= wish.memory:
                    best.add(Candidate(layout, schedule, taken, held))
    return Found(tuple(best.kept), seen, None if best.kept else nearest)


def meshes(wish: Wish) -> Iterator[Layout]:
    """Every mesh of the machine's devices on which the shape can be laid, one row at a time."""
    shape, machine = wish.shape, wish.machine
    tensor = [size for size in divisors(machine.count) if size <= machine.host and shape.heads % size == 0]
    stages = [size for size in divisors(machine.count) if size <= shape.layers]
    rows = [size for size in divisors(machine.count) if size == 1 or shape.sequence / size >= max(2, wish.least)]
    choices = {"tp": tensor, "pp": stages, "cp": rows}
    lists = [[wish.fixed[axis]] if axis in wish.fixed else sizes for axis, sizes in choices.items()]
    for tp, pp, cp in product(*lists):
        dp, rest = divmod(machine.count, tp * pp * cp)
        if rest or wish.fixed.get("dp", dp) != dp or wish.batch % dp or dp > wish.batch:
            continue
        if any(size == 1 for axis, size in (("pp", pp), ("cp", cp)) if axis in wish.divided):
            continue
        if any(each % (tp * pp * cp) for each in wish.kinds):
            continue
        sequence = tp > 1 and shape.sequence % (tp * cp) == 0
        mesh = replace(wish.base, dp=dp, tp=tp, pp=pp, cp=cp, sequence=sequence, micro_batch=1, micros=wish.batch // dp)
        for swaps in _swaps(wish, mesh):
            yield replace(mesh, swaps=swaps)


def _swaps(wish: Wish, mesh: Layout) -> Iterator[int]:
    """How many ranks along cp may exchange tokens for heads."""
    allowed = {"": range(mesh.cp + 1), "none": (1,), "all": (mesh.cp,), "some": range(2, mesh.cp)}[wish.exchange]
    for size in divisors(mesh.cp):
        if wish.shape.heads // mesh.tp % size == 0 and size in allowed:
            yield size


def batches(wish: Wish, mesh: Layout) -> Iterator[Layout]:
    """`mesh` with every number of rows that may go through at once, fewest first."""
    rows = wish.batch // mesh.dp
    for each in divisors(rows):
        if wish.fixed.get("micro", each) == each and (not wish.at_once or rows // each <= mesh.pp):
            yield replace(mesh, micro_batch=each, micros=rows // each)


def over(wish: Wish, sized: Layout) -> Iterator[tuple[Layout, str]]:
    """All that may lie over a mesh with its micro-batches, each with the name of its order."""
    for shards, within in shares(wish, sized):
        for reruns in wish.reruns:
            base = replace(sized, shards=shards, within=within, reruns=reruns)
            if sized.pp == 1:
                yield base, ""
                continue
            for schedule, order, chunks in turns(wish):
                layout = replace(base, order=order, chunks=chunks)
                if not any(layout.faults(wish.shape)):
                    yield layout, schedule


def refused(wish: Wish) -> Fault | None:
    """Why nothing lies over any mesh of `wish`; None where there is no mesh, or something lies over one."""
    shared, first = False, None
    for mesh in meshes(wish):
        for sized in batches(wish, mesh):
            if not any(shares(wish, sized)):
                continue
            shared = True
            if any(over(wish, sized)):
                return None
            for _, order, chunks in turns(wish) if sized.pp > 1 else ():
                first = first or next(replace(sized, order=order, chunks=chunks).faults(wish.shape), None)
    words = [f"{word} {size}" for word, size in wish.fixed.items() if word in ("shards", "within")]
    if words and not shared and any(meshes(wish)):
        return Fault(f"no copies are left that share states as {', '.join(words)} says", "fix fewer axes, or no shares")
    return first


def shares(wish: Wish, sized: Layout) -> Iterator[tuple[int, int]]:
    """Which states copies share, and among how many of them (0: all)."""
    stages = range(4) if sized.sharers > 1 else (0,)
    for shards in stages:
        if wish.fixed.get("shards", shards) != shards:
            continue
        if "within" in wish.fixed:
            if shards and sized.dp % wish.fixed["within"] == 0:
                yield shards, wish.fixed["within"]
            continue
        yield shards, 0
        if shards == 3:
            groups = [hosts * wish.machine.host // (sized.tp * sized.cp) for hosts in HOSTS]
            yield from ((shards, size) for size in groups if 1 < size < sized.dp and sized.dp % size == 0)


def turns(wish: Wish) -> Iterator[tuple[str, Order, int]]:
    """The orders along pp by name, with the chunks of a rank."""
    fixed = wish.fixed.get("chunks", 0)
    for schedule, (order, chunks) in wish.orders.items():
        for each in [chunks] if chunks else [fixed] if fixed else CHUNKS:
            if fixed in (0, each):
                yield schedule, order, each


def _lean(wish: Wish, sized: Layout) -> Iterator[Layout]:
    """What holds least over a mesh with its micro-batches, the leanest first; no more than any layout over it."""
    order = min((order for order, _ in wish.orders.values()), key=lambda order: (order.both, order.held, order.even))
    for shards in (3, 2, 1, 0):
        if wish.fixed.get("shards", shards) == shards or sized.sharers == 1:
            for reruns in reversed(wish.reruns):
                yield replace(sized, shards=shards, reruns=reruns, order=order)


def may_fit(wish: Wish, sized: Layout) -> bool:
    """Whether anything that lies over a mesh with its micro-batches may fit."""
    return any(footprint(wish.shape, layout).total <= wish.memory for layout in _lean(wish, sized))


def _smallest(wish: Wish, sized: Layout) -> tuple[Layout, Footprint]:
    """Of all that may lie over a mesh with its micro-batches, what holds least."""
    return min(((layout, footprint(wish.shape, layout)) for layout in _lean(wish, sized)), key=lambda each: each[1].total)


def _least(wish: Wish, sized: Layout, made: Parts) -> float:
    """Seconds that a step takes at least: without what is rerun, summed over copies or waited for."""
    ends = made.first.all + made.last.all if sized.pp == 1 else 0.0
    layers = (made.layer.all + made.met.all) * wish.shape.layers / sized.pp
    return sized.micros * (layers + ends) + wish.machine.rates.fixed_s
