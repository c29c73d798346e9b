"""What one rank along pp has: so many layers, the embedding or the head, and so many micro-batches under way.

    layers    L layers over p ranks, the first ones taking the rest; where that does not come out even and L + 2 does, as `ends`
    ends      embedding, L layers and head, dealt as L + 2 equal items
    norm      embedding, L layers, last norm and head: L + 3 items
    cost      by weights: a rank's part ends with the layer that passes its share; the head counts as V h, the embedding nothing

Under one forward, one backward rank r of p holds min(m, p - r) micro-batches; in chunks, v of them per rank, what the warm-up has
run: (2 (p - r - 1) + (v - 1) p + 1) / v; an order that fills its gaps with halves of backward holds as many on every rank.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 2.2; V. Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3;
P. Qi et al. 2023, arXiv 2401.10241, table 1.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from meshwright.planner.habits import Cut
from meshwright.planner.layout import Layout
from meshwright.planner.shapes import Shape


class Stage(NamedTuple):
    """The layers of a rank along pp, and whether it has the embedding (`first`) and the head (`last`)."""

    layers: int
    first: bool
    last: bool


def stage(shape: Shape, layout: Layout, rank: int, cut: Cut = "layers") -> Stage:
    """What `rank` along pp has of `shape`. Where parts are folded the first rank has both ends, and no layer more."""
    layers, pp = shape.layers, layout.pp
    if pp == 1:
        return Stage(layers, True, True)
    if layout.order.both:  # the parts of both ranks that have them, and both ends twice
        low, high = _span(layers, pp, rank)
        return Stage(high - low, rank in (0, pp - 1), rank in (0, pp - 1))
    if layout.order.folded:
        low, high = _span(layers, pp, pp - 1 - rank)  # the ends are heavy: the first takes no layer more
        return Stage(high - low, rank == 0, rank == 0)
    if cut == "cost":
        return _by_cost(layers, pp, shape.layer_numel, shape.table_numel)[rank]
    if cut == "layers" and (layers % pp == 0 or (layers + 2) % pp):
        low, high = _span(layers, pp, rank)
        return Stage(high - low, rank == 0, rank == pp - 1)
    low, high = _span(layers + (3 if cut == "norm" else 2), pp, rank)
    return Stage(max(0, min(high, layers + 1) - max(low, 1)), rank == 0, rank == pp - 1)


def fullest(layout: Layout, cut: Cut = "layers") -> Iterable[int]:
    """The ranks along pp of which one holds most.

    The first, whose micro-batches stay longest; the second, which may have a layer in the place of the embedding; the last, with
    the logits. Where parts are cut by cost a layer more may be on any.
    """
    if cut == "cost":
        return range(layout.pp)
    return sorted({0, min(1, layout.pp - 1), layout.pp - 1})


def under_way(layout: Layout, rank: int) -> float:
    """How many micro-batches' activations `rank` along pp holds at once, in units of all its layers."""
    pp, parts, held = layout.pp, layout.chunks, layout.order.held
    if pp == 1:
        return 1.0
    if layout.order.both:
        most = held * (pp + 1)  # each of one of its two parts
    elif layout.order.even:
        most = held * pp
    elif parts > 1:
        most = held * (2 * (pp - rank - 1) + (parts - 1) * pp + 1) / parts
    else:
        most = held * (pp - rank)
    return min(layout.micros, most)


def _span(items: int, parts: int, part: int) -> tuple[int, int]:
    """The items of one part, the first parts taking the rest."""
    each, rest = divmod(items, parts)
    low = part * each + min(part, rest)
    return low, low + each + (part < rest)


@cache
def _by_cost(layers: int, pp: int, layer: float, table: float) -> tuple[Stage, ...]:
    total, run, rank = layers * layer + table, 0.0, 0
    counts = [0] * pp
    for _ in range(layers):
        counts[rank] += 1
        run += layer
        if rank < pp - 1 and run > total * (rank + 1) / pp:
            rank += 1
    return tuple(Stage(count, part == 0, part == pp - 1) for part, count in enumerate(counts))
