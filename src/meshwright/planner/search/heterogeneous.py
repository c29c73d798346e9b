"""Devices of several kinds: how work is laid on them, so that the fast ones wait little for the slow ones.

    copies     each on devices of one kind, all with the same rows: everybody waits for the slowest, and the least memory counts
    along pp   each rank along pp on devices of one kind; layers are dealt by speed, as far as memory allows. Kinds with more
               memory come first, where most micro-batches are under way
    alone      one kind does all, and the others stand still: what the two above are worth

No group of tensor ranks, and none of ranks that have tokens of the same rows, mixes kinds. Between hosts the slower card counts.

    layers of a rank = argmin max_k l_k t_k,   sum_k n_k l_k = L,   l_k at most what the memory of kind k takes

t_k is what kind k takes for a layer of one micro-batch, n_k how many ranks along pp it has. Dealt one by one to whoever is ready
first with one more, which is optimal for equal layers. What ranks along pp wait is by the formulas of equal ranks, of their mean.

Limits: unlike copies get as many rows each (a step is the sum over samples of all, and rows are not divided by speed); orders
whose parts go there and back, or lie twice, are not laid on unlike devices.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshwright.planner.analytic.memory import Footprint, by_rank
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout, Order
from meshwright.planner.analytic.step_time import Parts, parts, step
from meshwright.planner.machine.machine import Machine, with_nic
from meshwright.planner.search.candidates import lean, meshes, over, shares, turns
from meshwright.planner.search.lower_bounds import EXACT, Rows, a_layer, a_row, behind, between, waits
from meshwright.planner.search.request import SHARE, Wish
from meshwright.planner.search.search import Best, Candidate, Found, search, sift


@dataclass(frozen=True)
class Kind:
    """The devices of one kind: the `first` of the ranks along pp that it has, how many these are, and the layers of each.

    `made`: what a micro-batch takes them, where that is counted already.
    """

    machine: Machine
    first: int
    ranks: int
    dealt: tuple[int, ...] = ()
    made: Parts | None = None

    @property
    def layers(self) -> int:
        """Of the rank that has most."""
        return max(self.dealt)


def weakest(machines: Sequence[Machine]) -> Machine:
    """All devices as if each were, in every respect, the worst of them: what copies that wait for each other come to."""
    slow = min(machines, key=lambda each: each.peak("bfloat16") * each.rates.product)
    devices = [each.device for each in machines]
    shared = set.intersection(*(set(device.flops) for device in devices))
    device = replace(
        slow.device,
        name=" and ".join(f"{each.count} {each.device.name}" for each in machines),
        flops={dtype: min(device.flops[dtype] for device in devices) for dtype in sorted(shared)},
        memory=min(device.memory for device in devices),
        memory_rate=min(device.memory_rate for device in devices),
        link_rate=min(device.link_rate for device in devices),
        nic_rate=min(device.nic_rate for device in devices),
        devices_per_host=min(device.devices_per_host for device in devices),
    )
    return replace(
        slow,
        device=device,
        count=sum(each.count for each in machines),
        per_host=min(each.host for each in machines),
    )


def search_unlike(wish: Wish, machines: Sequence[Machine], keep: int = 10, *, prune: bool = True) -> Found:
    """The best layouts on all of `machines`; `wish` says all but the devices. Without `prune` all are priced: the same."""
    together = replace(wish, machine=weakest(machines), kinds=tuple(each.count for each in machines))
    found = search(together, keep, prune=prune)
    best = Best(keep)
    for each in found.best:
        best.add(each)
    apart = Apart(together, machines)
    seen = found.seen + sift(apart.wish, apart.meshes(), apart, best, prune=prune)
    return Found(tuple(best.kept), seen, None if best.kept else found.nearest)


def alone(wish: Wish, machines: Sequence[Machine]) -> Iterator[tuple[Machine, Candidate | None]]:
    """Each kind with what it does by itself; None where nothing fits."""
    for each in machines:
        kept = {axis: size for axis, size in wish.fixed.items() if axis != "dp"}
        found = search(replace(wish, machine=each, fixed=kept), 1)
        yield each, next(iter(found.best), None)


class Apart:
    """Ranks along pp on unlike kinds, each rank on one, those with most memory first."""

    def __init__(self, together: Wish, machines: Sequence[Machine]) -> None:
        plain = {
            name: each
            for name, each in together.orders.items()
            if each[1] == 1 and not (each[0].folded or each[0].both)
        }
        self.wish = replace(together, kinds=(), divided=(*together.divided, "pp"), orders=plain)
        ordered = sorted(machines, key=lambda each: -each.device.memory)
        self._counts = [each.count for each in ordered]
        self._machines = [_joined(each, together.machine) for each in ordered]
        self._rows, self._parts = (
            dict[tuple[float, ...], list[Rows]](),
            dict[tuple[float, ...], list[Parts]](),
        )

    def meshes(self) -> Iterator[Layout]:
        """Those on which no group but that of ranks along pp mixes kinds."""
        for mesh in meshes(self.wish) if self.wish.orders else ():
            if not any(count % (mesh.tp * mesh.sharers) for count in self._counts):
                yield mesh

    def floor(self, mesh: Layout) -> float:
        """Its rows, with layers dealt as if they could be cut, and what comes behind them."""
        key = mesh.tp, mesh.cp, mesh.swaps, mesh.apart
        if key not in self._rows:
            self._rows[key] = [a_row(self.wish.shape, mesh, machine) for machine in self._machines]
        rows = self._rows[key]
        most = min(max(row.first, row.last) for row in rows)
        return EXACT * (
            mesh.micros * (self._shared(mesh, [row.layer for row in rows]) + most) + self._behind(mesh)
        )

    def may_fit(self, sized: Layout) -> bool:
        """Whether all kinds together have room for all layers where these hold least."""
        kinds, shape = self._kinds(sized), self.wish.shape
        for layout in lean(self.wish, sized):
            rooms = [_room(shape, layout, kind) for kind in kinds]
            if (
                all(rooms)
                and sum(room * kind.ranks for room, kind in zip(rooms, kinds, strict=True)) >= shape.layers
            ):
                return True
        return False

    def least(self, sized: Layout) -> float:
        """Its layers, and the order in which ranks along pp wait least."""
        return min(
            (self.turn(sized, order, chunks) for _, order, chunks in turns(self.wish, sized)), default=inf
        )

    def price(self, sized: Layout, best: Best, below: float) -> int:
        """Layers dealt, step and memory of each."""
        seen, kinds = 0, self._kinds(sized)
        allowed = [turn for turn in turns(self.wish, sized) if self.turn(sized, *turn[1:]) <= below]
        for layout, schedule in over(self.wish, sized, allowed):
            seen += 1
            dealt = deal(self.wish.shape, layout, kinds)
            candidate = None if dealt is None else _priced(self.wish.shape, layout, schedule, dealt)
            if candidate is not None and candidate.seconds <= best.worst:
                best.add(candidate)
        return seen

    def turn(self, sized: Layout, order: Order, chunks: int) -> float:
        """Seconds that a step takes at least in which ranks along pp take turns in this `order`."""
        shape, made, ranks = self.wish.shape, self._made(sized), self._ranks(sized)
        layers = [a_layer(sized, machine, each) for machine, each in zip(self._machines, made, strict=True)]
        found = sized.micros * self._shared(sized, [each.all for each in layers])
        found += sized.micros * min(max(each.first.all, each.last.all) for each in made) + self._behind(sized)
        one = min(waits(sized, order, chunks, each) for each in layers)  # for each layer of a rank
        found += one * shape.layers / sized.pp
        sent = [between(shape, sized, machine, chunks) for machine in self._machines]
        return EXACT * (found + sum(count * each for count, each in zip(ranks, sent, strict=True)) / sized.pp)

    def _shared(self, mesh: Layout, layers: Sequence[float]) -> float:
        """Seconds of the slowest rank where a layer takes each kind as long as `layers` says."""
        return self.wish.shape.layers / sum(
            count / each for count, each in zip(self._ranks(mesh), layers, strict=True)
        )

    def _behind(self, mesh: Layout) -> float:
        wish = self.wish
        return min(behind(wish.shape, mesh, machine, shares(wish, mesh)) for machine in self._machines)

    def _made(self, sized: Layout) -> list[Parts]:
        key = sized.tp, sized.cp, sized.swaps, sized.apart, sized.micro_batch
        if key not in self._parts:
            self._parts[key] = [parts(self.wish.shape, sized, machine) for machine in self._machines]
        return self._parts[key]

    def _ranks(self, mesh: Layout) -> list[int]:
        return [count // (mesh.tp * mesh.sharers) for count in self._counts]

    def _kinds(self, sized: Layout) -> tuple[Kind, ...]:
        """The kinds with the ranks along pp that each has."""
        ranks, made = self._ranks(sized), self._made(sized)
        each = enumerate(zip(self._machines, ranks, made, strict=True))
        return tuple(
            Kind(machine, sum(ranks[:at]), count, made=known) for at, (machine, count, known) in each
        )


def _joined(kind: Machine, together: Machine) -> Machine:
    """Devices of `kind` among all of them: on the slower network."""
    slower = min(kind.device.nic_rate, together.device.nic_rate)
    return with_nic(replace(kind, count=together.count), slower)


def deal(shape: Shape, layout: Layout, kinds: Sequence[Kind]) -> tuple[Kind, ...] | None:
    """`kinds` with the layers of each of their ranks; None where memory does not take all."""
    takes = [_room(shape, layout, kind) for kind in kinds]
    if 0 in takes:
        return None
    paces = [_pace(shape, layout, kind) for kind in kinds]
    layers, left = [[1] * kind.ranks for kind in kinds], shape.layers - layout.pp
    while left > 0:
        free = [at for at in range(len(kinds)) if max(layers[at]) < takes[at]]
        if not free:
            return None
        at = min(free, key=lambda at: (max(layers[at]) + 1) * paces[at])
        more = min(left, kinds[at].ranks)  # a last few do not come out even
        layers[at] = [count + (rank < more) for rank, count in enumerate(layers[at])]
        left -= more
    return tuple(replace(kind, dealt=tuple(each)) for kind, each in zip(kinds, layers, strict=True))


def _room(shape: Shape, layout: Layout, kind: Kind) -> int:
    """The most layers that the first rank of a kind takes; 0: none."""
    low, high = 0, shape.layers + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = (
            _held(shape, layout, replace(kind, dealt=(middle,))).total <= SHARE * kind.machine.device.memory
        )
        low, high = (middle, high) if fits else (low, middle)
    return low


def _held(shape: Shape, layout: Layout, kind: Kind) -> Footprint:
    """What the fuller of the first and the last rank of a kind holds, with its layers."""
    even = replace(shape, layers=kind.layers * layout.pp)
    ends = {kind.first, kind.first + kind.ranks - 1}
    return max((held for _, held in by_rank(even, layout, ranks=ends)), key=lambda each: each.total)


def _pace(shape: Shape, layout: Layout, kind: Kind) -> float:
    """Seconds that a rank of a kind is busy for each of its layers, without embedding and head."""
    less, more = (
        step(replace(shape, layers=layers * layout.pp), layout, kind.machine, kind.made) for layers in (1, 2)
    )
    return more.compute + more.tensor - less.compute - less.tensor


def _priced(shape: Shape, layout: Layout, schedule: str, kinds: Sequence[Kind]) -> Candidate:
    """The step that everybody waits for: computed by the slowest, waited for by the mean."""
    steps = [
        step(replace(shape, layers=kind.layers * layout.pp), layout, kind.machine, kind.made)
        for kind in kinds
    ]
    slowest = max(steps, key=lambda each: each.compute + each.tensor)
    waiting = sum(kind.ranks * each.waiting for kind, each in zip(kinds, steps, strict=True)) / layout.pp
    taken = replace(
        slowest,
        waiting=waiting,
        copies=max(each.copies for each in steps),
        optimizer=max(each.optimizer for each in steps),
        fixed=max(each.fixed for each in steps),
    )
    fullest = max(kinds, key=lambda kind: _held(shape, layout, kind).total / kind.machine.device.memory)
    dealt = tuple((kind.machine.device.name, layers) for kind in kinds for layers in kind.dealt)
    return Candidate(layout, schedule, taken, _held(shape, layout, fullest), dealt)
