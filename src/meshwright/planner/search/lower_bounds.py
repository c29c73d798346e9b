"""Computes lower bounds on the step time of a mesh, so that most configurations need not be evaluated.

    of a mesh            the layers, at the time per sample of an endlessly large microbatch
    with microbatches    the layers at their microbatch size, the least pipeline wait of any schedule, the
                         least cost of data parallelism

Each bound holds for every configuration of the mesh, because it only leaves something out:

    time per sample    partly filled tiles, kernel starts and latencies cost less per sample in larger
                       microbatches. The part of the ring transfers that attention hides grows with the
                       kernel starts, by no more than these
    pipeline wait      recomputation, gathers and launches lengthen forward and backward, never W, and with
                       them the wait: (p - 1) (f F + b B + w W) / v rises with F and B, and is never below 0
    ZeRO               the cheapest stage, with one microbatch of reductions

The search evaluates meshes in the order of their bounds, and stops at the first one that cannot beat the
configurations it has kept.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from meshwright.planner.analytic.closed_form_step_time import (
    MicrobatchTime,
    boundary_send_s,
    grad_reduce_s,
    launch_bound,
    microbatch_time,
    update_s,
)
from meshwright.planner.analytic.layer_time import PassTime
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import (
    GradientCodec,
    OffloadMode,
    ParallelConfig,
    ScheduleProfile,
)
from meshwright.planner.machine.machine import Machine

LARGE_MICRO_BATCH = 2.0**40  # samples
# bounds are multiplied by it, so that rounding, and the tiles of LARGE_MICRO_BATCH, do not raise them too far
SAFETY_FACTOR = 1 - 1e-6


@dataclass(frozen=True)
class SampleBound:
    """Lower bounds on the seconds of a sample on one rank: of a layer, of the embedding and of the head."""

    layer: float
    embedding: float
    head: float


def sample_bound(shape: ModelShape, mesh: ParallelConfig, machine: Machine) -> SampleBound:
    """Returns a lower bound on the seconds of a sample, for microbatches of any size."""
    microbatch = microbatch_time(
        shape, replace(mesh, micro_batch=LARGE_MICRO_BATCH, num_microbatches=1), machine
    )
    scale = SAFETY_FACTOR / LARGE_MICRO_BATCH
    return SampleBound(
        (microbatch.layer + microbatch.collectives).total * scale,
        microbatch.embedding.total * scale,
        microbatch.head.total * scale,
    )


def end_bound_s(
    config: ParallelConfig, orders: Iterable[ScheduleProfile], embedding: float, head: float
) -> float:
    """Returns the least seconds of embedding and head on the slowest pp rank, under one of `orders`."""
    if config.pp == 1:
        return embedding + head
    return (
        (embedding + head) / 2
        if any(profile.is_bidirectional for profile in orders)
        else max(embedding, head)
    )


def slowest_rank_s(shape: ModelShape, config: ParallelConfig, layer: float, end_s: float) -> float:
    """Returns the seconds of the slowest pp rank; `layer` is the time of a layer."""
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
    """Returns a lower bound on the seconds that pp ranks wait for each other.

    `stage` is the time of a rank without recomputation and gathers; the slowest rank has `load_ratio` times
    the mean number of layers.
    """
    other_ranks = config.pp - load_ratio
    bubble_s = profile.f * stage.forward + profile.b * stage.backward + profile.w * stage.deferrable
    wait_s = (
        max(0.0, bubble_s)
        * other_ranks
        * ((config.pp / 2 - 1) / (config.pp - 1) if profile.is_bidirectional else 1.0)
        / virtual_stages
    )
    if not (profile.fills_bubbles and stage.weight_grad):
        return wait_s
    extra_s = (config.pp / 2 - 2) * stage.weight_grad if profile.is_bidirectional else 0.0
    unfilled_s = (
        other_ranks * (stage.forward + stage.backward - stage.weight_grad)
        - (config.num_microbatches - 1) * stage.weight_grad
        + extra_s
    )
    return max(wait_s, unfilled_s)


def boundary_transfer_s(
    shape: ModelShape, config: ParallelConfig, machine: Machine, virtual_stages: int
) -> float:
    """Returns the seconds that pp ranks wait for the transfers between stages."""
    send_s = boundary_send_s(shape, config, machine)
    overhead_s = (
        send_s * machine.rates.boundary_exposed * (1 - config.overlap_fraction)
        + machine.rates.microbatch_overhead_s
    )
    return 2 * (config.pp - 1) * send_s + config.num_microbatches * virtual_stages * overhead_s


def layer_time(config: ParallelConfig, machine: Machine, microbatch: MicrobatchTime) -> PassTime:
    """Returns the time of a layer for one microbatch, without recomputation and gathers."""
    return launch_bound(microbatch.layer + microbatch.collectives, replace(config, recompute="none"), machine)


def stage_time(shape: ModelShape, config: ParallelConfig, layer: PassTime) -> PassTime:
    """Returns the time of a microbatch on one pp rank, without embedding and head."""
    share = shape.layers / config.pp
    return PassTime(layer.forward * share, layer.backward * share, layer.weight_grad * share)


def tail_bound_s(
    shape: ModelShape,
    mesh: ParallelConfig,
    machine: Machine,
    zero_options: Iterable[tuple[int, int]],
    offload_modes: Sequence[OffloadMode] = ("none",),
    codecs: Sequence[GradientCodec] = ("",),
) -> float:
    """Returns a lower bound on the seconds after the last microbatch.

    These are gradient reduction, the optimizer and its copies, with the cheapest of `zero_options`, of
    `offload_modes` and of `codecs`.
    """
    configs = [
        replace(
            mesh,
            zero_stage=zero_stage,
            zero_group_size=zero_group_size,
            num_microbatches=1,
            offload=offload,
            compress=codec,
        )
        for zero_stage, zero_group_size in zero_options
        for offload in offload_modes
        for codec in codecs
    ]
    reduce_s = [
        0.0 if config.overlap_fraction else grad_reduce_s(shape, config, machine, PassTime())
        for config in configs
    ]
    step_s = [sum(update_s(shape, config, machine, inf)) for config in configs]
    return min(map(sum, zip(reduce_s, step_s, strict=True)), default=0.0) + machine.rates.step_overhead_s
