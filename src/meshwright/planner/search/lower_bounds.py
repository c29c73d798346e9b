"""What a step takes at least: less than any layout over a mesh takes, so that most of them need not be
priced.

    of a mesh           its rows at what a row takes where endlessly many go through at once
    with micro-batches  its layers at their size, the least that ranks along pp wait by any order, the least
                        that copies cost

Both are true of every layout, because each only leaves something out:

    a row      tiles that are not full, kernels' starts, latencies: all of them count less, the more rows
               there are. What
               attention hides of the keys that go round grows with its start, by no more than the start
                   itself is
    ranks      what is rerun, gathered or asked for late makes forward and backward longer, never W, and with
               them what is waited:
               (p - 1) (f F + b B + w W) / chunks  rises with F and B, and is never less than 0
    copies     of all shares the one that costs least, its sums behind one micro-batch

So the best mesh is looked at first, and where one cannot beat what is kept, none behind it can.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig, ScheduleProfile
from meshwright.planner.analytic.step_time import (
    MicrobatchTime,
    PassTime,
    boundary_send_s,
    grad_reduce_s,
    launch_bound,
    microbatch_time,
    optimizer_s,
)
from meshwright.planner.machine.machine import Machine

LARGE_MICRO_BATCH = 2.0**40  # rows at once
SAFETY_FACTOR = (
    1 - 1e-6
)  # what is left of a bound, so that neither rounding nor the tiles of ENDLESS rows lift it too high


@dataclass(frozen=True)
class SampleBound:
    """Seconds of a row of a mesh on one rank, all its layers, forward and backward: of a layer and of both
    ends.
    """

    layer: float
    embedding: float
    head: float


def sample_bound(shape: ModelShape, mesh: ParallelConfig, machine: Machine) -> SampleBound:
    """What a row takes at least, however many go through at once."""
    made = microbatch_time(shape, replace(mesh, micro_batch=LARGE_MICRO_BATCH, num_microbatches=1), machine)
    share = SAFETY_FACTOR / LARGE_MICRO_BATCH
    return SampleBound(
        (made.layer + made.collectives).total * share, made.embedding.total * share, made.head.total * share
    )


def end_bound_s(
    config: ParallelConfig, orders: Iterable[ScheduleProfile], embedding: float, head: float
) -> float:
    """Of the embedding and the head, what the slowest rank along pp has at least under one of `orders`."""
    if config.pp == 1:
        return embedding + head
    return (embedding + head) / 2 if any(order.is_bidirectional for order in orders) else max(embedding, head)


def slowest_rank_s(shape: ModelShape, config: ParallelConfig, layer: float, end_s: float) -> float:
    """Of the slowest rank along pp, where each layer takes `layer`."""
    layers = config.max_layers_per_rank(shape)
    if layers == shape.layers / config.pp:
        return layer * layers + end_s
    return max(layer * layers, layer * (layers - 1) + end_s)


def pipeline_wait_bound_s(
    config: ParallelConfig,
    profile: ScheduleProfile,
    virtual_stages: int,
    stage: PassTime,
    load_ratio: float = 1.0,
) -> float:
    """Seconds that ranks along pp wait for each other at least.

    `whole` is a rank's part without what is rerun or gathered; the slowest rank has `share` times as many
    layers as the mean.
    """
    others = config.pp - load_ratio
    one = profile.f * stage.forward + profile.b * stage.backward + profile.w * stage.deferrable
    waited = (
        max(0.0, one)
        * others
        * ((config.pp / 2 - 1) / (config.pp - 1) if profile.is_bidirectional else 1.0)
        / virtual_stages
    )
    if not (profile.fills_bubbles and stage.weight_grad):
        return waited
    more = (config.pp / 2 - 2) * stage.weight_grad if profile.is_bidirectional else 0.0
    least = (
        others * (stage.forward + stage.backward - stage.weight_grad)
        - (config.num_microbatches - 1) * stage.weight_grad
        + more
    )
    return max(waited, least)


def boundary_transfer_s(
    shape: ModelShape, config: ParallelConfig, machine: Machine, virtual_stages: int
) -> float:
    """Seconds that ranks along pp wait for what goes from one to the next."""
    handed = boundary_send_s(shape, config, machine)
    turn = (
        handed * machine.rates.boundary_exposed * (1 - config.overlap_fraction)
        + machine.rates.microbatch_overhead_s
    )
    return 2 * (config.pp - 1) * handed + config.num_microbatches * virtual_stages * turn


def layer_time(config: ParallelConfig, machine: Machine, microbatch: MicrobatchTime) -> PassTime:
    """What a layer takes for a micro-batch, without what is rerun or gathered."""
    return launch_bound(microbatch.layer + microbatch.collectives, replace(config, recompute="none"), machine)


def stage_time(shape: ModelShape, config: ParallelConfig, layer: PassTime) -> PassTime:
    """What a micro-batch takes a rank along pp, without the ends, of which a layer takes `one`."""
    share = shape.layers / config.pp
    return PassTime(layer.forward * share, layer.backward * share, layer.weight_grad * share)


def tail_bound_s(
    shape: ModelShape, mesh: ParallelConfig, machine: Machine, zero_options: Iterable[tuple[int, int]]
) -> float:
    """Seconds behind the last micro-batch: sums over copies and the optimizer, by the cheapest of all
    `shares`.
    """
    given = [
        replace(mesh, zero_stage=shards, zero_group_size=within, num_microbatches=1)
        for shards, within in zero_options
    ]
    sums = [
        0.0 if layout.overlap_fraction else grad_reduce_s(shape, layout, machine, PassTime())
        for layout in given
    ]
    steps = [optimizer_s(shape, layout, machine) for layout in given]
    return min(map(sum, zip(sums, steps, strict=True)), default=0.0) + machine.rates.step_overhead_s
