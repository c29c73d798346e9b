"""Which layout is best: of all there are (planner/choices.py), those that fit, in order of the seconds that a step takes.

Two bounds keep this short, and neither can lose the best. A mesh of which nothing fits with one row at a time fits with no more.
And no step takes less than what is told of its mesh before anything over it is priced (planner/least.py): meshes are looked at in
that order, best first, so that where one takes more than the worst that is kept, it is the last one.

Layouts that differ in nothing that anybody would feel (shares of other states, or half the copies of rows cut twice as often with
twice as many at once, in as many seconds and as much memory) are kept once, the plainest of equals. What a layer takes is counted
once for all that lies over a mesh. Layouts are sketched (planner/sketch.py); the one that is chosen is made a plan, whose program
is priced action by action.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from meshwright.planner.analytic.memory import Footprint, footprint
from meshwright.planner.analytic.parallel_config import Layout, Order
from meshwright.planner.analytic.step_time import Parts, Step, parts, step
from meshwright.planner.search.candidates import batches, may_fit, meshes, over, shares, smallest, turns
from meshwright.planner.search.lower_bounds import (
    EXACT,
    Rows,
    a_layer,
    a_row,
    behind,
    between,
    busy,
    ends,
    part,
    waits,
)
from meshwright.planner.search.request import Wish


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
    def rank(self) -> tuple[float, ...]:
        """What candidates are ordered by: of two as fast and as small the one that divides less, whichever was found first."""
        laid = self.layout
        plainest = (
            laid.tp,
            laid.pp,
            laid.cp,
            laid.swaps,
            laid.micro_batch,
            laid.chunks,
            laid.shards,
            laid.within,
        )
        return float(f"{self.seconds:.10g}"), round(self.footprint.total), *plainest

    @property
    def seen(self) -> tuple[object, ...]:
        """What anybody sees of it: two that are alike in this are shown once."""
        laid = self.layout
        # fewer copies of rows cut finer, with as many more rows at once: a rank has the same tokens and shares
        alike = replace(
            laid, shards=0, within=0, dp=laid.sharers, cp=1, micro_batch=laid.micro_batch / laid.cp
        )
        return alike, self.schedule, self.dealt, f"{self.seconds:.3g}", f"{self.footprint.total / 2**30:.1f}"


@dataclass(frozen=True)
class Found:
    """The best candidates, the best one first; how many layouts were `seen`, and of those that do not fit the `nearest`."""

    best: tuple[Candidate, ...]
    seen: int
    nearest: tuple[Layout, Footprint] | None


class Best:
    """The `keep` best candidates so far that take no more than `below` seconds, of those that are alike the first."""

    def __init__(self, keep: int, below: float = inf) -> None:
        self.keep, self.below = keep, below
        self.kept: list[Candidate] = []

    @property
    def worst(self) -> float:
        """Seconds that a candidate may take at most."""
        return self.kept[-1].seconds if len(self.kept) == self.keep else self.below

    def add(self, found: Candidate) -> None:
        """Keep it, where it is one of the best."""
        twin = next((each for each in self.kept if each.seen == found.seen), None)
        if twin is not None and twin.rank <= found.rank:
            return
        if twin is not None:
            self.kept.remove(twin)
        insort(self.kept, found, key=lambda each: each.rank)
        del self.kept[self.keep :]


class Ground(Protocol):
    """What layouts are priced on: one kind of device here, several in planner/unlike.py."""

    def floor(self, mesh: Layout) -> float:
        """Seconds that a step of any layout over `mesh` takes at least."""

    def may_fit(self, sized: Layout) -> bool:
        """Whether anything that lies over a mesh with its micro-batches may fit; if not, nothing with more rows at once does."""

    def least(self, sized: Layout) -> float:
        """Seconds that a step of any layout over a mesh with its micro-batches takes at least."""

    def price(self, sized: Layout, best: Best, below: float) -> int:
        """Show `best` all that lies over a mesh with its micro-batches and may take `below` seconds; how many these were."""


def search(wish: Wish, keep: int = 10, *, prune: bool = True, below: float = inf) -> Found:
    """The `keep` best layouts of `wish`, none that takes more than `below` seconds. Without `prune` all are priced: the same."""
    best, laid = Best(keep, below), list(meshes(wish))
    seen = sift(wish, laid, Alike(wish), best, prune=prune)
    if best.kept or below < inf:
        return Found(tuple(best.kept), seen, None)
    nearest = [each for each in (smallest(wish, mesh) for mesh in laid) if each[1].total > wish.memory]
    return Found((), seen, min(nearest, key=lambda each: each[1].total, default=None))


def sift(wish: Wish, laid: Iterable[Layout], ground: Ground, best: Best, *, prune: bool = True) -> int:
    """Show `best` all over the meshes `laid` that may be among the best, those first that may be fastest; how many these were."""
    seen = 0
    if not prune:
        return sum(ground.price(sized, best, inf) for mesh in laid for sized in batches(wish, mesh))
    for floor, mesh in sorted(((ground.floor(mesh), mesh) for mesh in laid), key=lambda each: each[0]):
        if floor > best.worst:
            break
        sizes = list(batches(wish, mesh))
        fitting = sizes[: bisect_left(sizes, True, key=lambda sized: not ground.may_fit(sized))]
        for least, sized in sorted(
            ((ground.least(sized), sized) for sized in fitting), key=lambda each: each[0]
        ):
            if least > best.worst:
                break
            seen += ground.price(sized, best, best.worst)
    return seen


class Alike:
    """Devices of one kind."""

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._orders = [order for order, _ in wish.orders.values()]
        self._rows, self._parts = dict[tuple[float, ...], Rows](), dict[tuple[float, ...], Parts]()
        self._behind = dict[tuple[int, ...], float]()

    def floor(self, mesh: Layout) -> float:
        """Its rows, and what comes behind them."""
        wish, key = self._wish, (mesh.tp, mesh.cp, mesh.swaps, mesh.apart)
        if key not in self._rows:
            self._rows[key] = a_row(wish.shape, mesh, wish.machine)
        row = self._rows[key]
        most = ends(mesh, self._orders, row.first, row.last)
        return EXACT * (mesh.micros * busy(wish.shape, mesh, row.layer, most) + self._late(mesh))

    def may_fit(self, sized: Layout) -> bool:
        """Whether the leanest does."""
        return may_fit(self._wish, sized)

    def least(self, sized: Layout) -> float:
        """Its layers, and the order in which ranks along pp wait least."""
        return min(
            (self.turn(sized, order, chunks) for _, order, chunks in turns(self._wish, sized)), default=inf
        )

    def turn(self, sized: Layout, order: Order, chunks: int) -> float:
        """Seconds that a step takes at least in which ranks along pp take turns in this `order`."""
        shape, machine, made = self._wish.shape, self._wish.machine, self._made(sized)
        one = a_layer(sized, machine, made)
        most = ends(sized, (order,), made.first.all, made.last.all)
        found = sized.micros * busy(shape, sized, one.all, most) + self._late(sized)
        if sized.pp > 1:
            share = sized.layers(shape) * sized.pp / shape.layers
            found += waits(sized, order, chunks, part(shape, sized, one), share) + between(
                shape, sized, machine, chunks
            )
        return EXACT * found

    def price(self, sized: Layout, best: Best, below: float) -> int:
        """Step and memory of each."""
        wish, made, seen = self._wish, self._made(sized), 0
        allowed = [turn for turn in turns(wish, sized) if self.turn(sized, *turn[1:]) <= below]
        for layout, schedule in over(wish, sized, allowed):
            seen += 1
            taken = step(wish.shape, layout, wish.machine, made)
            if taken.seconds > best.worst:
                continue
            held = footprint(wish.shape, layout)
            if held.total <= wish.memory:
                best.add(Candidate(layout, schedule, taken, held))
        return seen

    def _made(self, sized: Layout) -> Parts:
        key = sized.tp, sized.cp, sized.swaps, sized.apart, sized.micro_batch
        if key not in self._parts:
            self._parts[key] = parts(self._wish.shape, sized, self._wish.machine)
        return self._parts[key]

    def _late(self, mesh: Layout) -> float:
        key = mesh.tp, mesh.pp, mesh.cp, mesh.dp
        if key not in self._behind:
            wish = self._wish
            self._behind[key] = behind(wish.shape, mesh, wish.machine, shares(wish, mesh))
        return self._behind[key]
