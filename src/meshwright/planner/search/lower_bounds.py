"""What a step takes at least: less than any layout over a mesh takes, so that most of them need not be priced.

    of a mesh           its rows at what a row takes where endlessly many go through at once
    with micro-batches  its layers at their size, the least that ranks along pp wait by any order, the least that copies cost

Both are true of every layout, because each only leaves something out:

    a row      tiles that are not full, kernels' starts, latencies: all of them count less, the more rows there are. What
               attention hides of the keys that go round grows with its start, by no more than the start itself is
    ranks      what is rerun, gathered or asked for late makes forward and backward longer, never W, and with them what is waited:
               (p - 1) (f F + b B + w W) / chunks  rises with F and B, and is never less than 0
    copies     of all shares the one that costs least, its sums behind one micro-batch

So the best mesh is looked at first, and where one cannot beat what is kept, none behind it can.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import Layout, Order
from meshwright.planner.analytic.step_time import Both, Parts, handover, paced, parts, stepped, summed
from meshwright.planner.machine.machine import Machine

ENDLESS = 2.0**40  # rows at once
EXACT = (
    1 - 1e-6
)  # what is left of a bound, so that neither rounding nor the tiles of ENDLESS rows lift it too high


@dataclass(frozen=True)
class Rows:
    """Seconds of a row of a mesh on one rank, all its layers, forward and backward: of a layer and of both ends."""

    layer: float
    first: float
    last: float


def a_row(shape: Shape, mesh: Layout, machine: Machine) -> Rows:
    """What a row takes at least, however many go through at once."""
    made = parts(shape, replace(mesh, micro_batch=ENDLESS, micros=1), machine)
    share = EXACT / ENDLESS
    return Rows((made.layer + made.met).all * share, made.first.all * share, made.last.all * share)


def ends(layout: Layout, orders: Iterable[Order], first: float, last: float) -> float:
    """Of the embedding and the head, what the slowest rank along pp has at least under one of `orders`."""
    if layout.pp == 1:
        return first + last
    return (first + last) / 2 if any(order.both for order in orders) else max(first, last)


def busy(shape: Shape, layout: Layout, layer: float, ends: float) -> float:
    """Of the slowest rank along pp, where each layer takes `layer`."""
    layers = layout.layers(shape)
    if layers == shape.layers / layout.pp:
        return layer * layers + ends
    return max(layer * layers, layer * (layers - 1) + ends)


def waits(layout: Layout, order: Order, chunks: int, whole: Both, share: float = 1.0) -> float:
    """Seconds that ranks along pp wait for each other at least.

    `whole` is a rank's part without what is rerun or gathered; the slowest rank has `share` times as many layers as the mean.
    """
    others = layout.pp - share
    one = order.f * whole.forward + order.b * whole.backward + order.w * whole.late
    waited = max(0.0, one) * others * ((layout.pp / 2 - 1) / (layout.pp - 1) if order.both else 1.0) / chunks
    if not (order.fills and whole.weights):
        return waited
    more = (layout.pp / 2 - 2) * whole.weights if order.both else 0.0
    least = (
        others * (whole.forward + whole.backward - whole.weights) - (layout.micros - 1) * whole.weights + more
    )
    return max(waited, least)


def between(shape: Shape, layout: Layout, machine: Machine, chunks: int) -> float:
    """Seconds that ranks along pp wait for what goes from one to the next."""
    handed = handover(shape, layout, machine)
    turn = handed * machine.rates.handover * (1 - layout.hidden) + machine.rates.turn_s
    return 2 * (layout.pp - 1) * handed + layout.micros * chunks * turn


def a_layer(layout: Layout, machine: Machine, made: Parts) -> Both:
    """What a layer takes for a micro-batch, without what is rerun or gathered."""
    return paced(made.layer + made.met, replace(layout, reruns="none"), machine)


def part(shape: Shape, layout: Layout, one: Both) -> Both:
    """What a micro-batch takes a rank along pp, without the ends, of which a layer takes `one`."""
    share = shape.layers / layout.pp
    return Both(one.forward * share, one.backward * share, one.weights * share)


def behind(shape: Shape, mesh: Layout, machine: Machine, shares: Iterable[tuple[int, int]]) -> float:
    """Seconds behind the last micro-batch: sums over copies and the optimizer, by the cheapest of all `shares`."""
    given = [replace(mesh, shards=shards, within=within, micros=1) for shards, within in shares]
    sums = [0.0 if layout.hidden else summed(shape, layout, machine, Both()) for layout in given]
    steps = [stepped(shape, layout, machine) for layout in given]
    return min(map(sum, zip(sums, steps, strict=True)), default=0.0) + machine.rates.fixed_s
