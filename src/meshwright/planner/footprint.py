"""Bytes that a rank holds at most, from sizes alone: states, gradients, activations, logits, what passes through.

    states        weights 2, gradients 2 or 4, master and two moments 12 per weight, each divided by those who share it
    activations   what backward needs of a layer and a micro-batch, times the micro-batches that are under way at once
    logits        of one micro-batch, on the last rank along pp: 16-bit, float32, and the gradient of both
    gathered      where weights lie in shards: two layers whole, and the gradients of one

Per layer and token, in units of the hidden size h, 16-bit (arXiv 2205.05198, table 2, for fused attention, a gate and grouped
heads): what norms and matrices take in is whole on every tensor rank (unless tokens lie on them: `sequence`), q, k, v, what
attention gives out and what lies inside the MLP is divided. Attention that is not fused keeps its scores: 5 a s / h more.
What is rerun leaves a layer's input alone, and one layer's inside while it is rerun.

Papers: S. Rajbhandari et al. 2019, arXiv 1910.02054, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198, section 4.
"""

from dataclasses import dataclass

from meshwright.planner.layout import Layout
from meshwright.planner.roofline import HALF
from meshwright.planner.shapes import Shape

STATES = 12  # bytes per weight of a float32 master and two moments
CONTEXT = 2 * 2**30  # of a driver's context and of communicators, measured as 0.5 to 2 GiB on 8 devices
GAPS = 1.04  # what an allocator cannot fill


@dataclass(frozen=True)
class Footprint:
    """Bytes of a rank, by category (see the module); `context` is of the driver and of communicators."""

    weights: float
    gradients: float
    moments: float
    activations: float
    logits: float
    gathered: float
    context: float

    @property
    def total(self) -> float:
        """All of it, with the gaps between."""
        held = self.weights + self.gradients + self.moments + self.activations + self.logits + self.gathered
        return held * GAPS + self.context


def footprint(shape: Shape, layout: Layout) -> Footprint:
    """Of the rank that holds most: the first along pp, whose micro-batches stay longest, or the last, which has the logits."""
    ranks = {0, layout.pp - 1}
    return max((_of(shape, layout, rank) for rank in ranks), key=lambda each: each.total)


def _of(shape: Shape, layout: Layout, rank: int) -> Footprint:
    first, last = rank == 0, rank == layout.pp - 1
    tables = 1 if shape.tied and layout.pp == 1 else first + last
    own = (layout.layers(shape) * shape.layer_numel + tables * shape.table_numel) / layout.tp
    shared = [1 if layout.shards < stage else layout.sharers for stage in (1, 2, 3)]
    layer = shape.layer_numel / layout.tp
    return Footprint(
        weights=HALF * own / shared[2],
        gradients=layout.sums * own / shared[1],
        moments=STATES * own / shared[0],
        activations=_activations(shape, layout, under_way(layout, rank)),
        logits=layout.tokens(shape) * shape.vocab / layout.tp * (HALF + 4 + 4) if last else 0.0,
        gathered=(2 * HALF + layout.sums) * layer if shared[2] > 1 else 0.0,
        context=CONTEXT,
    )


def under_way(layout: Layout, rank: int) -> float:
    """How many micro-batches' activations `rank` along pp holds at once, in units of all its layers."""
    if layout.pp == 1:
        return 1.0
    first = layout.order.held * layout.pp
    if layout.chunks > 1:
        first *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
    return min(layout.micros, first - rank * layout.order.held)


def _activations(shape: Shape, layout: Layout, times: float) -> float:
    whole, scores = _per_layer(shape, layout)
    layers = layout.layers(shape)
    entered = HALF * layout.tokens(shape) * shape.hidden / (layout.tp if layout.sequence else 1)
    if layout.reruns == "layers":
        kept = layout.rerun_share * entered + (1 - layout.rerun_share) * (whole + scores)
        return times * layers * kept + whole + scores
    if layout.reruns == "attention":
        return times * layers * whole + scores
    return times * layers * (whole + scores)


def _per_layer(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Bytes that backward needs of one layer and micro-batch; and of these, its scores."""
    tokens, h, tp = layout.tokens(shape), shape.hidden, layout.tp
    unit = HALF * tokens * h
    groups = shape.groups / shape.heads
    entered = unit * (4 if layout.fused else 6) / (tp if layout.sequence else 1)  # by two norms and two matrices
    inside = unit * (2 + 2 * groups + (shape.inward + 1) * shape.inner / h) / tp
    if layout.kernel in ("flash1", "flash2"):
        return entered + inside, 0.0
    return entered + inside, 5 * tokens * shape.sequence * shape.heads / tp
