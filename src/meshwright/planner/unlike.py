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

from meshwright.planner.footprint import Footprint, by_rank
from meshwright.planner.hardware import Machine, with_nic
from meshwright.planner.layout import Layout
from meshwright.planner.search import Best, Candidate, Found, batches, meshes, over, search
from meshwright.planner.shapes import Shape
from meshwright.planner.sketch import step
from meshwright.planner.wish import SHARE, Wish


@dataclass(frozen=True)
class Kind:
    """The devices of one kind: the `first` of the ranks along pp that it has, how many these are, and the layers of each."""

    machine: Machine
    first: int
    ranks: int
    dealt: tuple[int, ...] = ()

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
        per_host=min(device.per_host for device in devices),
    )
    return replace(slow, device=device, count=sum(each.count for each in machines), per_host=min(each.host for each in machines))


def search_unlike(wish: Wish, machines: Sequence[Machine], keep: int = 10) -> Found:
    """The best layouts on all of `machines`; `wish` says all but the devices."""
    together = replace(wish, machine=weakest(machines), kinds=tuple(each.count for each in machines))
    found = search(together, keep)
    best, seen = Best(keep), found.seen
    for each in found.best:
        best.add(each)
    for layout, schedule, kinds in _laid(together, machines):
        seen += 1
        dealt = deal(wish.shape, layout, kinds)
        candidate = None if dealt is None else _priced(wish.shape, layout, schedule, dealt)
        if candidate is not None and candidate.seconds < best.worst:
            best.add(candidate)
    return Found(tuple(best.kept), seen, None if best.kept else found.nearest)


def alone(wish: Wish, machines: Sequence[Machine]) -> Iterator[tuple[Machine, Candidate | None]]:
    """Each kind with what it does by itself; None where nothing fits."""
    for each in machines:
        kept = {axis: size for axis, size in wish.fixed.items() if axis != "dp"}
        found = search(replace(wish, machine=each, fixed=kept), 1)
        yield each, next(iter(found.best), None)


def _laid(wish: Wish, machines: Sequence[Machine]) -> Iterator[tuple[Layout, str, tuple[Kind, ...]]]:
    """Layouts whose ranks along pp lie on unlike kinds, each rank on one, those with most memory first."""
    plain = {name: each for name, each in wish.orders.items() if each[1] == 1 and not (each[0].folded or each[0].both)}
    free = replace(wish, kinds=(), divided=(*wish.divided, "pp"), orders=plain)
    ordered = sorted(machines, key=lambda each: -each.device.memory)
    for mesh in meshes(free):
        beside = mesh.tp * mesh.sharers
        if not plain or any(each.count % beside for each in ordered):
            continue
        ranks = [each.count // beside for each in ordered]
        kinds = tuple(Kind(_joined(each, wish.machine), sum(ranks[:at]), ranks[at]) for at, each in enumerate(ordered))
        for sized in batches(free, mesh):
            yield from ((layout, schedule, kinds) for layout, schedule in over(free, sized))


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
        fits = _held(shape, layout, replace(kind, dealt=(middle,))).total <= SHARE * kind.machine.device.memory
        low, high = (middle, high) if fits else (low, middle)
    return low


def _held(shape: Shape, layout: Layout, kind: Kind) -> Footprint:
    """What the fuller of the first and the last rank of a kind holds, with its layers."""
    even = replace(shape, layers=kind.layers * layout.pp)
    ends = {kind.first, kind.first + kind.ranks - 1}
    return max((held for _, held in by_rank(even, layout, ranks=ends)), key=lambda each: each.total)


def _pace(shape: Shape, layout: Layout, kind: Kind) -> float:
    """Seconds that a rank of a kind is busy for each of its layers, without embedding and head."""
    less, more = (step(replace(shape, layers=layers * layout.pp), layout, kind.machine) for layers in (1, 2))
    return more.compute + more.tensor - less.compute - less.tensor


def _priced(shape: Shape, layout: Layout, schedule: str, kinds: Sequence[Kind]) -> Candidate:
    """The step that everybody waits for: computed by the slowest, waited for by the mean."""
    steps = [step(replace(shape, layers=kind.layers * layout.pp), layout, kind.machine) for kind in kinds]
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
