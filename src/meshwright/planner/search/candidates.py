"""Every layout there is for a wish: what a machine and a shape allow, before anybody asks what is best.

    for every mesh      tp on a host, pp up to the layers, cp where a row is long, dp the rest; who exchanges tokens for heads
    micro-batches       every divisor of a copy's rows
    and what lies over  shares of states 0 .. 3, among all copies or those of some hosts; what is rerun; orders along pp

Of a mesh, what holds least is known without looking at all that lies over it; and more rows at once hold more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from meshwright.plan.job.errors import Diagnostic
from meshwright.plan.sharding.mesh import divisors
from meshwright.planner.analytic.memory import Footprint, footprint
from meshwright.planner.analytic.parallel_config import Layout, Order
from meshwright.planner.search.request import Wish

CHUNKS = (2, 4, 8)  # of layers per rank along pp, where an order takes any number
Turn = tuple[str, Order, int]  # an order along pp by its name, with the chunks of a rank
HOSTS = (1, 4, 16)  # whose copies share states among themselves, where these lie in shards


def meshes(wish: Wish) -> Iterator[Layout]:
    """Every mesh of the machine's devices on which the shape can be laid, one row at a time."""
    shape, machine = wish.shape, wish.machine
    tensor = [size for size in divisors(machine.count) if size <= machine.host and shape.heads % size == 0]
    stages = [size for size in divisors(machine.count) if size <= shape.layers]
    rows = [
        size for size in divisors(machine.count) if size == 1 or shape.sequence / size >= max(2, wish.least)
    ]
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
        mesh = replace(
            wish.base, dp=dp, tp=tp, pp=pp, cp=cp, sequence=sequence, micro_batch=1, micros=wish.batch // dp
        )
        for swaps in _swaps(wish, mesh):
            yield replace(mesh, swaps=swaps)


def _swaps(wish: Wish, mesh: Layout) -> Iterator[int]:
    """How many ranks along cp may exchange tokens for heads."""
    allowed = {"": range(mesh.cp + 1), "none": (1,), "all": (mesh.cp,), "some": range(2, mesh.cp)}[
        wish.exchange
    ]
    for size in divisors(mesh.cp):
        if wish.shape.heads // mesh.tp % size == 0 and size in allowed:
            yield size


def batches(wish: Wish, mesh: Layout) -> Iterator[Layout]:
    """`mesh` with every number of rows that may go through at once, fewest first."""
    rows = wish.batch // mesh.dp
    for each in divisors(rows):
        if wish.fixed.get("micro", each) == each and (not wish.at_once or rows // each <= mesh.pp):
            yield replace(mesh, micro_batch=each, micros=rows // each)


def over(wish: Wish, sized: Layout, allowed: Sequence[Turn] | None = None) -> Iterator[tuple[Layout, str]]:
    """All that may lie over a mesh with its micro-batches, each with the name of its order; of these the `allowed`, or all."""
    allowed = list(turns(wish, sized)) if allowed is None else allowed
    for shards, within in shares(wish, sized):
        for reruns in wish.reruns:
            base = replace(sized, shards=shards, within=within, reruns=reruns)
            yield from (
                (replace(base, order=order, chunks=chunks), schedule) for schedule, order, chunks in allowed
            )


def refused(wish: Wish) -> Diagnostic | None:
    """Why nothing lies over any mesh of `wish`; None where there is no mesh, or something lies over one."""
    shared, first = False, None
    for mesh in meshes(wish):
        for sized in batches(wish, mesh):
            if not any(shares(wish, sized)):
                continue
            shared = True
            if any(over(wish, sized)):
                return None
            for _, order, chunks in every_turn(wish) if sized.pp > 1 else ():
                first = first or next(replace(sized, order=order, chunks=chunks).faults(wish.shape), None)
    words = [f"{word} {size}" for word, size in wish.fixed.items() if word in ("shards", "within")]
    if words and not shared and any(meshes(wish)):
        return Diagnostic(
            f"no copies are left that share states as {', '.join(words)} says", "fix fewer axes, or no shares"
        )
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


def turns(wish: Wish, sized: Layout) -> Iterator[Turn]:
    """The orders in which ranks along pp may take turns."""
    if sized.pp == 1:
        yield "", sized.order, sized.chunks
        return
    for schedule, order, chunks in every_turn(wish):
        if not any(replace(sized, order=order, chunks=chunks).faults(wish.shape)):
            yield schedule, order, chunks


def every_turn(wish: Wish) -> Iterator[Turn]:
    """The orders along pp by name, with the chunks of a rank."""
    fixed = wish.fixed.get("chunks", 0)
    for schedule, (order, chunks) in wish.orders.items():
        for each in [chunks] if chunks else [fixed] if fixed else CHUNKS:
            if fixed in (0, each):
                yield schedule, order, each


def lean(wish: Wish, sized: Layout) -> Iterator[Layout]:
    """What holds least over a mesh with its micro-batches, the leanest first; no more than any layout over it."""
    orders = [order for order, _ in wish.orders.values()] if sized.pp > 1 else [sized.order]
    order = min(orders, key=lambda order: (order.both, order.held, order.even))
    for shards in (3, 2, 1, 0):
        if wish.fixed.get("shards", shards) == shards or sized.sharers == 1:
            for reruns in reversed(wish.reruns):
                yield replace(sized, shards=shards, reruns=reruns, order=order)


def may_fit(wish: Wish, sized: Layout) -> bool:
    """Whether anything that lies over a mesh with its micro-batches may fit."""
    return any(footprint(wish.shape, layout).total <= wish.memory for layout in lean(wish, sized))


def smallest(wish: Wish, sized: Layout) -> tuple[Layout, Footprint]:
    """Of all that may lie over a mesh with its micro-batches, what holds least."""
    return min(
        ((layout, footprint(wish.shape, layout)) for layout in lean(wish, sized)),
        key=lambda each: each[1].total,
    )
