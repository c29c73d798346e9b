"""Bytes that a rank holds at most, from sizes alone: states, activations, logits, what passes through, and what lies between.

    weights, gradients, moments    per weight, each divided by those who share it
    activations                    what backward needs of a layer and a micro-batch, times the micro-batches under way at once
    inside | logits                the fuller of two moments: the backward of one block, where what is rerun is there once more;
                                   the loss, with every copy of one micro-batch's logits. The first is kept small by recomputing,
                                   the second by tensor ranks
    gathered                       layers whole where weights lie in shards, the gradients of one, buffers of fixed size
    gaps                           what an allocator has reserved and nothing lives in
    context                        of a driver and of communicators: in a device's figure, not in torch's

    held = N (w + g / share + o / share) + in flight x layers x kept + max(inside, logits) + gathered
    peak = held (1 + gaps) + context

What exists at once is a habit of the code base: planner/habits.py names it, and its defaults are this library's own engine's.
Which rank along pp is the fullest is asked of the first two and the last (planner/stages.py).

Cost: some tens of microseconds a call. Limits: decoders of equal layers; fragmentation is a share, though in truth it comes
from the order of a step, and decides a run that fits barely; temporaries of single operations are those of the two moments.

Papers: S. Rajbhandari et al. 2019, arXiv 1910.02054, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198, section 4.

What one rank along pp has: so many layers, the embedding or the head, and so many micro-batches under way.

    layers    L layers over p ranks, the first ones taking the rest; where that does not come out even and L + 2 does, as `ends`
    ends      embedding, L layers and head, dealt as L + 2 equal items
    norm      embedding, L layers, last norm and head: L + 3 items
    cost      by weights: a rank's part ends with the layer that passes its share; the head counts as V h, the embedding nothing

Under one forward, one backward rank r of p holds min(m, p - r) micro-batches; in chunks, v of them per rank, what the warm-up has
run: (2 (p - r - 1) + (v - 1) p + 1) / v; an order that fills its gaps with halves of backward holds as many on every rank.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 2.2; V. Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.3;
P. Qi et al. 2023, arXiv 2401.10241, table 1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from meshwright.planner.analytic.framework_memory import OURS, Cut, Habits
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout
from meshwright.planner.machine.roofline import HALF


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


# bytes of a score in its backward, beside what is kept: its gradient in 16 bits; by torch in float32 before and behind softmax
BACK = {"eager": 6, "softmax": 2}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank, by category (see the module); `context` is of the driver and of communicators."""

    weights: float
    gradients: float
    moments: float
    activations: float
    inside: float
    logits: float
    gathered: float
    gaps: float
    context: float

    @property
    def states(self) -> float:
        """What does not go with the micro-batch: weights, gradients, the optimizer's."""
        return self.weights + self.gradients + self.moments

    @property
    def alive(self) -> float:
        """What tensors hold: torch's allocated bytes."""
        return self.states + self.activations + self.inside + self.logits + self.gathered

    @property
    def reserved(self) -> float:
        """What an allocator has taken for them: torch's reserved bytes."""
        return self.alive + self.gaps

    @property
    def total(self) -> float:
        """All of it: what the device's own figure shows."""
        return self.reserved + self.context


@dataclass(frozen=True)
class _Layer:
    """Bytes of one layer and micro-batch: what it keeps, its backward's own, and what is handed to the next rank along pp."""

    kept: float
    inside: float
    handed: float


def footprint(shape: Shape, layout: Layout, habits: Habits = OURS) -> Footprint:
    """Of the rank that holds most, in code of such `habits`."""
    return max((held for _, held in by_rank(shape, layout, habits)), key=lambda each: each.total)


def by_rank(
    shape: Shape, layout: Layout, habits: Habits = OURS, ranks: Iterable[int] = ()
) -> Iterator[tuple[int, Footprint]]:
    """What `ranks` along pp hold (none given: those of which one holds most), each with its rank."""
    one = _layer(shape, layout, habits)
    for rank in ranks or fullest(layout, habits.cut):
        yield rank, _of(shape, layout, habits, rank, one)


def _of(shape: Shape, layout: Layout, habits: Habits, rank: int, one: _Layer) -> Footprint:
    part = stage(shape, layout, rank, habits.cut)
    both = 2 if layout.order.both else 1  # micro-batches from both ends: two parts of a rank
    own = (both * part.layers * shape.layer_numel + _tables(shape, part) * shape.table_numel) / layout.tp
    shared = [1 if layout.shards < stage else layout.holders for stage in (1, 2, 3)]
    sums = layout.sums if habits.gradients is None else habits.gradients
    moments = habits.moments + (habits.shared if layout.shards else 0)
    times = under_way(layout, rank)
    logits = _logits(shape, layout, habits) if part.last else 0.0
    states = own * habits.weights / shared[2], own * sums / shared[1], own * moments / shared[0]
    activations = times * (part.layers * one.kept + (one.handed if layout.pp > 1 else 0.0))
    gathered = habits.fixed + _gathered(shape, layout, habits, part, own, sums)
    each = habits.pinned + (habits.split if layout.kernel in BACK else 0)
    pinned = each * layout.tokens(shape) * shape.vocab if part.last else 0.0
    inside, logits, pinned = (0.0, logits, pinned) if logits + pinned > one.inside else (one.inside, 0.0, 0.0)
    alive = sum(states) + activations + inside + logits + gathered
    always, tensor, pipe = habits.context
    context = always + (tensor if layout.tp > 1 else 0.0) + (pipe if layout.pp > 1 else 0.0)
    gaps = (habits.gaps - 1) * alive + pinned
    return Footprint(*states, activations, inside, logits, gathered, gaps, context)


def _layer(shape: Shape, layout: Layout, habits: Habits) -> _Layer:
    tokens, tp, h = layout.tokens(shape), layout.tp, shape.hidden
    unit, over = tokens * h, tp if layout.sequence else 1
    stream = habits.stream + (0 if layout.fused else habits.unfused)
    plain = layout.kernel in BACK
    groups = (1 + shape.groups / shape.heads) / 2
    within = tokens * shape.attended * groups * (habits.inner + (0 if plain else habits.flash))
    within += tokens * shape.inner * _mlp(shape, layout, habits)
    whole = stream * unit / over + habits.whole * unit / (1 if habits.gathered else over) + within / tp
    each = habits.eager if layout.kernel == "eager" else habits.softmax
    pairs = tokens * shape.sequence * shape.heads / tp
    scores = each * pairs if plain else 0.0
    entered = HALF * unit / over
    handed = HALF * unit if habits.handed else entered
    parts = habits.inside * (6 * tokens * shape.inner / tp + 4 * unit + BACK.get(layout.kernel, 0) * pairs)
    if layout.reruns == "layers":
        kept = layout.rerun_share * entered + (1 - layout.rerun_share) * (whole + scores)
        return _Layer(kept, whole + scores + parts, handed)
    if layout.reruns == "operators" or (layout.reruns == "attention" and habits.opwise):
        # q, v, two of the MLP's, what attention gives out
        products = HALF * tokens * (shape.attended * (2 + shape.groups / shape.heads) + h + shape.inner) / tp
        return _Layer(entered + products, whole + parts, handed)
    if layout.reruns == "attention":
        return _Layer(whole, scores + parts, handed)
    return _Layer(whole + scores, parts, handed)


def _mlp(shape: Shape, layout: Layout, habits: Habits) -> float:
    if not shape.gated:
        return habits.plain
    return habits.gated - (HALF if layout.compiled else 0)


def _tables(shape: Shape, part: Stage) -> int:
    return 1 if shape.tied and part.first and part.last else part.first + part.last


def _logits(shape: Shape, layout: Layout, habits: Habits) -> float:
    """All copies of one micro-batch's logits, and what waits of another's."""
    each = (
        habits.logit + (habits.across if layout.tp > 1 else 0) + (habits.waiting if layout.micros > 1 else 0)
    )
    return each * layout.tokens(shape) * shape.vocab / (layout.tp if habits.divided else 1)


def _gathered(shape: Shape, layout: Layout, habits: Habits, part: Stage, own: float, sums: float) -> float:
    """What is whole for a while where gradients, and weights, lie in shards: weights in 16 bits, and gradients."""
    if layout.sharers == 1 or layout.shards < 2:
        return 0.0
    layer, table = shape.layer_numel / layout.tp, shape.table_numel / layout.tp
    largest = max(layer, table) if (part.first or part.last) and not habits.ends else layer
    if layout.shards == 2:
        return sums * habits.behind * largest
    if habits.stays and layout.pp > 1:
        return (HALF + sums) * own
    there = HALF * _tables(shape, part) * table if habits.ends else 0.0
    return there + (HALF * habits.ahead + sums * habits.behind) * largest
