"""Seconds of a step in closed form: what each rank computes, sends and waits for.

    a microbatch        its layers (layer_time.py, expert_time.py); on the last pp rank the head and the loss
    small kernels       a layer is not faster than its kernel launches
    gather per param    a copy for each rank's shard of each weight, without overlap: it grows with ranks
    a step              microbatches x the slowest rank  +  pipeline wait  +  exposed gradient reduction
                        + the optimizer

A closed form takes microseconds, a program seconds: a search evaluates thousands of the one and few of the
other. The formulas are those of the papers; what they leave out (unequal stages, overlapping transfers) shows
in the simulation of the program.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198,
section 4.
"""

from dataclasses import dataclass

from meshwright.planner.analytic.closed_form_memory import saved_layer_nbytes
from meshwright.planner.analytic.compression_cost import coded_pass_seconds, compressed_sum
from meshwright.planner.analytic.expert_time import expert_compute, expert_dispatch, local_expert_numel
from meshwright.planner.analytic.layer_time import (
    PassTime,
    embedding_time,
    head_time,
    layer_collectives,
    layer_compute,
)
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.offload_cost import (
    SteppedElements,
    activation_copy_seconds,
    fetch_seconds,
    update_seconds,
)
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import (
    HALF_NBYTES,
    all_gather_seconds,
    send_seconds,
)

KERNELS_PER_LAYER = 80  # kernels of a layer's forward
PARAMS_PER_LAYER = 12  # of a layer: matrices, biases and norms
ADAMW_NBYTES_PER_PARAM = (
    28  # bytes that AdamW reads and writes per weight: gradient, master, two moments, and the weight itself
)


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by category; they add up to the step."""

    compute: float
    tp_comm: float
    pipeline_wait: float
    dp_comm: float
    optimizer: float
    fixed: float
    host_copies: float = 0.0

    @property
    def seconds(self) -> float:
        """All of them."""
        on_device = self.compute + self.tp_comm + self.pipeline_wait + self.dp_comm + self.optimizer
        return on_device + self.fixed + self.host_copies


@dataclass(frozen=True)
class MicrobatchTime:
    """Seconds of a microbatch on one rank: a layer and its collectives, the embedding and the head."""

    layer: PassTime
    collectives: PassTime
    embedding: PassTime
    head: PassTime


def microbatch_time(shape: ModelShape, config: ParallelConfig, machine: Machine) -> MicrobatchTime:
    """Returns the times of `config` without recomputation: equal for equal tp, cp and microbatch."""
    given = shape, config, machine
    return MicrobatchTime(
        layer_compute(*given) + expert_compute(*given),
        layer_collectives(*given) + expert_dispatch(*given),
        embedding_time(*given),
        head_time(*given),
    )


def step_time(
    shape: ModelShape, config: ParallelConfig, machine: Machine, microbatch: MicrobatchTime | None = None
) -> StepTime:
    """Returns the seconds of a step of `shape` under `config` on `machine`.

    `microbatch` is a cached `microbatch_time`.
    """
    times = microbatch or microbatch_time(shape, config, machine)
    compute, collectives, first, last = times.layer, times.collectives, times.embedding, times.head
    if config.recompute == "layers":
        compute += PassTime(0.0, config.recompute_fraction * compute.forward)
        collectives += PassTime(0.0, config.recompute_fraction * collectives.forward)
    gathers = _param_gathers(shape, config, machine, compute + collectives)
    layers, per_rank = config.max_layers_per_rank(shape), shape.layers / config.pp
    layer = launch_bound(compute + collectives + gathers, config, machine)
    if config.pp == 1:
        slowest, wait_s, send_s = layer.total * shape.layers + first.total + last.total, 0.0, 0.0
    else:
        ends = first.total + last.total if config.schedule_profile.is_folded else max(first.total, last.total)
        ends = (first.total + last.total) / 2 if config.schedule_profile.is_bidirectional else ends
        if layers == per_rank:
            slowest = layer.total * layers + ends
        else:  # a rank with the head has a layer less, and may be busier for it
            layers, slowest = max(
                (layers, layer.total * layers),
                (layers - 1, layer.total * (layers - 1) + ends),
                key=lambda each: each[1],
            )
        stage = PassTime(layer.forward * per_rank, layer.backward * per_rank, layer.weight_grad * per_rank)
        others = config.pp * stage.total + first.total + last.total - slowest
        send_s = boundary_send_s(shape, config, machine)
        wait_s = pipeline_wait_s(config, stage, others) + 2 * (config.pp - 1) * send_s
    busy_s = config.num_microbatches * slowest
    per_microbatch_s = (
        send_s * machine.rates.boundary_exposed * (1 - config.overlap_fraction)
        + machine.rates.microbatch_overhead_s
        if config.pp > 1
        else 0.0
    )
    overhead_s = config.num_microbatches * config.virtual_stages * per_microbatch_s
    tp_comm_s = config.num_microbatches * collectives.total * layers
    backward_s = layers * layer.backward
    stepping_s, copies_s = update_s(shape, config, machine, backward_s)
    if config.activation_offload:
        nbytes, passes_s = saved_layer_nbytes(shape, config), (layer.forward, layer.backward)
        seen_s = activation_copy_seconds(nbytes, passes_s, layers, machine)
        copies_s += config.num_microbatches * seen_s
    return StepTime(
        compute=busy_s - tp_comm_s,
        tp_comm=tp_comm_s,
        pipeline_wait=wait_s + overhead_s,
        dp_comm=grad_reduce_s(shape, config, machine, PassTime(layers * layer.forward, backward_s)),
        optimizer=stepping_s,
        fixed=machine.rates.step_overhead_s,
        host_copies=copies_s,
    )


def pipeline_wait_s(config: ParallelConfig, stage: PassTime, others: float) -> float:
    """Returns the seconds that pp ranks wait, by the formula of their schedule.

    `stage` is a rank's time, `others` that of all ranks but one.
    """
    order = config.schedule_profile
    share = (order.f * stage.forward + order.b * stage.backward + order.w * stage.deferrable) / stage.total
    share *= (config.pp / 2 - 1) / (config.pp - 1) if order.is_bidirectional else 1.0
    # a W longer than what there is to wait fills no more than that
    return max(0.0, share * others / config.virtual_stages, unfilled_bubble_s(config, stage, others))


def unfilled_bubble_s(config: ParallelConfig, stage: PassTime, others: float) -> float:
    """Returns the least wait of pp ranks where too few microbatches have a W to fill bubbles with.

    For one microbatch only F and I are waited for; in a bidirectional schedule W of half of the ranks too.
    `stage` is a rank's time, `others` that of all ranks but one.
    """
    if not config.schedule_profile.fills_bubbles:
        return 0.0
    half, rest = stage.deferrable, stage.backward - stage.deferrable
    more = (config.pp / 2 - 2) * half if config.schedule_profile.is_bidirectional else 0.0
    return others * (stage.forward + rest) / stage.total - (config.num_microbatches - 1) * half + more


def launch_bound(layer: PassTime, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns the time of a layer, which is not faster than its kernel launches."""
    launch_s = KERNELS_PER_LAYER * machine.rates.kernel_launch_s * (0.5 if config.compiled else 1.0)
    launch_s *= config.launches
    recomputed = config.recompute_fraction if config.recompute == "layers" else 0.0
    return PassTime(
        _overlapped_max(layer.forward, launch_s),
        _overlapped_max(layer.backward, launch_s * (1.5 + recomputed)),
        layer.weight_grad,
    )


def _overlapped_max(one: float, other: float) -> float:
    """The longer of two that run side by side; if they are equal they delay each other a little."""
    return (one**4 + other**4) ** 0.25


def boundary_send_s(shape: ModelShape, config: ParallelConfig, machine: Machine) -> float:
    """Returns the seconds in which a microbatch goes from one pp rank to the next."""
    nbytes = (
        HALF_NBYTES
        * config.local_tokens(shape)
        * shape.hidden
        / (config.tp if config.sequence_parallel else 1)
    )
    return send_seconds(machine, nbytes, config.tp * config.data_parallel_size)


def _param_gathers(shape: ModelShape, config: ParallelConfig, machine: Machine, layer: PassTime) -> PassTime:
    """Exposed time of weight gathers under ZeRO 3.

    And the slowdown of gathers and computation by each other.
    """
    if config.zero_stage < 3 or (config.data_parallel_size == 1 and config.offload != "everything"):
        return PassTime()
    experts = local_expert_numel(shape, config)
    fetch_s = fetch_seconds(shape, config, machine, experts)  # a shard comes from the host before its gather
    if config.data_parallel_size == 1:
        return PassTime(max(0.0, fetch_s - layer.forward), max(0.0, fetch_s - layer.backward))
    nbytes = HALF_NBYTES * shape.layer_dense_numel / config.tp
    gather_s = all_gather_seconds(
        machine,
        nbytes / HALF_NBYTES * config.param_gather_itemsize,
        config.zero_shard_size,
        config.dp_stride,
        config.num_ranks,
    )
    backward_s = gather_s + _reduce_pass_s(config, machine, nbytes / HALF_NBYTES)
    expert_gather_s = _expert_gather_s(config, machine, experts * config.param_gather_itemsize)
    gather_s += expert_gather_s + fetch_s
    backward_s += fetch_s + expert_gather_s
    backward_s += _expert_gather_s(config, machine, experts * config.grad_reduce_itemsize)
    if config.gathers_per_param:
        copy_s = (
            PARAMS_PER_LAYER * config.zero_shard_size * machine.rates.kernel_launch_s
        )  # a copy for each rank's piece of each weight
        return PassTime(gather_s + copy_s, backward_s + copy_s)
    slowdown = machine.rates.overlap_slowdown
    return PassTime(
        max(0.0, gather_s - layer.forward) + slowdown * min(layer.forward, gather_s),
        max(0.0, backward_s - layer.backward) + slowdown * min(layer.backward, backward_s),
    )


def _rank_expert_numel(shape: ModelShape, config: ParallelConfig) -> float:
    """The elements of all experts on a rank, in all its layers."""
    layers = config.max_layers_per_rank(shape) * (2 if config.schedule_profile.is_bidirectional else 1)
    return layers * local_expert_numel(shape, config)


def _expert_gather_s(config: ParallelConfig, machine: Machine, nbytes: float) -> float:
    """Seconds of gathering, or reducing to shards, `nbytes` of experts among the ranks that have them."""
    if not nbytes:
        return 0.0
    return all_gather_seconds(
        machine, nbytes, config.expert_shard_size, config.expert_stride, config.num_ranks
    )


def grad_reduce_s(
    shape: ModelShape, config: ParallelConfig, machine: Machine, overlapping: PassTime
) -> float:
    """Returns the exposed seconds of gradient reduction and of gathering sharded weights.

    Sharded gradients are reduced after every microbatch, others once; with several ZeRO groups the shards
    are also reduced across them. In a bidirectional schedule two ranks have the same stage.
    """
    local_numel, ranks = config.max_numel_per_rank(shape), config.num_ranks
    pair_s = (
        2
        * all_gather_seconds(
            machine,
            local_numel * config.grad_reduce_itemsize,
            2,
            config.tp * config.data_parallel_size,
            ranks,
        )
        if config.schedule_profile.is_bidirectional
        else 0.0
    )
    if config.data_parallel_size == 1:
        return pair_s
    overlap = min(1.0, machine.rates.grad_reduce_overlap)
    groups = config.data_parallel_size / config.zero_shard_size
    group_s = 2 * _across_groups_s(config, machine, local_numel) * (1 - overlap) + pair_s
    expert_numel = _rank_expert_numel(shape, config)
    if expert_numel:
        expert_nbytes = expert_numel * config.grad_reduce_itemsize / config.expert_shard_size
        stride = config.dp_stride * config.zero_shard_size
        group_s += 2 * all_gather_seconds(machine, expert_nbytes, groups, stride, ranks) * (1 - overlap)
    numel = local_numel if config.zero_stage < 3 else 2 * shape.embedding_numel / config.tp
    reduce_s = _reduce_pass_s(config, machine, numel)
    gather_s = all_gather_seconds(
        machine, numel * HALF_NBYTES, config.zero_shard_size, config.dp_stride, ranks
    )
    if config.compress and not config.zero_stage:  # the second half of an all_reduce, not a gather of weights
        gather_s = reduce_s
    if config.zero_stage == 3:
        return reduce_s + gather_s + group_s
    reduce_s += _expert_gather_s(config, machine, expert_numel * config.grad_reduce_itemsize)
    gather_s += _expert_gather_s(config, machine, expert_numel * HALF_NBYTES)
    num_reductions = config.num_microbatches if config.zero_stage == 2 else 1
    if not config.overlap_fraction:
        return (num_reductions * reduce_s + gather_s) * (1 - overlap) + group_s
    embedding_share = min(
        1.0, shape.embedding_numel / config.tp / local_numel
    )  # the embedding's come when nothing is left to run beside them
    exposed_s = num_reductions * max(embedding_share * reduce_s, reduce_s - overlap * overlapping.backward)
    return exposed_s + max(embedding_share * gather_s, gather_s - overlap * overlapping.forward) + group_s


def _reduce_pass_s(config: ParallelConfig, machine: Machine, numel: float) -> float:
    """Seconds of reducing the gradients of `numel` weights to shards, as codes where these are."""
    if config.compress and config.num_zero_groups == 1:
        return coded_pass_seconds(config, machine, compressed_sum(config, numel), numel)
    nbytes = numel * config.grad_reduce_itemsize
    return all_gather_seconds(machine, nbytes, config.zero_shard_size, config.dp_stride, config.num_ranks)


def _across_groups_s(config: ParallelConfig, machine: Machine, numel: float) -> float:
    """Seconds of half of the all-reduce of a shard of the gradients of `numel` weights over ZeRO groups."""
    shards = config.zero_shard_size
    if config.compress and config.num_zero_groups > 1:
        return coded_pass_seconds(config, machine, compressed_sum(config, numel), numel / shards)
    nbytes = numel * config.grad_reduce_itemsize / shards
    stride = config.dp_stride * shards
    return all_gather_seconds(machine, nbytes, config.num_zero_groups, stride, config.num_ranks)


def optimizer_s(shape: ModelShape, config: ParallelConfig, machine: Machine) -> float:
    """Returns the seconds in which the optimizer reads and writes its tensors."""
    nbytes = 0.0
    for numel, num_shards in (
        (config.max_numel_per_rank(shape), config.zero_shard_size),
        (_rank_expert_numel(shape, config), config.expert_shard_size),
    ):
        each = ADAMW_NBYTES_PER_PARAM / num_shards + 4 if config.zero_stage else ADAMW_NBYTES_PER_PARAM
        nbytes += numel * each
    return nbytes / (machine.device.memory_rate * machine.rates.memory)


def update_s(
    shape: ModelShape, config: ParallelConfig, machine: Machine, backward_s: float
) -> tuple[float, float]:
    """Returns the seconds of the optimizer, on the device or on the host, and those of copies between them
    that nothing hides; `backward_s` is the backward of a microbatch.
    """
    device_step_s = optimizer_s(shape, config, machine)
    if config.offload == "none":
        return device_step_s, 0.0
    shards, expert_shards = (
        (config.zero_shard_size, config.expert_shard_size) if config.zero_stage else (1, 1.0)
    )
    numel = config.max_numel_per_rank(shape) / shards + _rank_expert_numel(shape, config) / expert_shards
    table = shape.embedding_numel / config.tp / shards
    layer = shape.layer_dense_numel / config.tp / shards
    experts = local_expert_numel(shape, config) / expert_shards
    stepped = SteppedElements(numel, table, max(table, layer, experts))
    return update_seconds(stepped, config, machine, device_step_s, backward_s)
