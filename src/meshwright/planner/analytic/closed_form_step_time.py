"""Seconds of a step in closed form: what each rank computes, sends and waits for.

    a layer, forward     4 or 5 matmuls, attention, memory operations, the collectives of tensor ranks
    backward             each matmul twice, attention 2.5 times; recomputed operations once more
    a microbatch        its layers; on the last pp rank the head and the loss
    in float8, float4    matmul inputs are cast; attention, norms and the head stay in 16 bits
    small kernels        a layer is not faster than its kernel launches
    odd head widths      scores of heads no multiple of 8 wide run at float32's speed
    gather per param     a copy for each rank's shard of each weight, without overlap: it grows with ranks
    a step               microbatches x the slowest rank  +  pipeline wait  +  exposed gradient reduction
                         + the optimizer

A closed form takes microseconds, a program seconds: a search evaluates thousands of the one and few of the
other. The formulas are those of the papers; what they leave out (unequal stages, overlapping transfers) shows
in the simulation of the program.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198,
section 4.
"""

from dataclasses import dataclass

from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ParallelConfig
from meshwright.planner.machine.machine import Machine
from meshwright.planner.machine.roofline import (
    HALF_NBYTES,
    all_gather_seconds,
    attention_seconds,
    matmul_seconds,
    memory_op_seconds,
    send_seconds,
)

HALF_DTYPE = "bfloat16"
KERNELS_PER_LAYER = 80  # kernels of a layer's forward
PARAMS_PER_LAYER = 12  # of a layer: matrices, biases and norms
# 16-bit elements that units for matrices load at once: heads of another width are computed by those for
# float32
HEAD_DIM_ALIGNMENT = 8
ADAMW_NBYTES_PER_PARAM = (
    28  # bytes that AdamW reads and writes per weight: gradient, master, two moments, and the weight itself
)


@dataclass(frozen=True)
class PassTime:
    """Seconds of a forward and of its backward.

    `weight_grad`: the part of the backward for weight gradients, if known.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight_grad: float = 0.0

    def __add__(self, other: "PassTime") -> "PassTime":
        return PassTime(
            self.forward + other.forward, self.backward + other.backward, self.weight_grad + other.weight_grad
        )

    @property
    def deferrable(self) -> float:
        """Seconds of W, which can be deferred; half of the backward if unknown."""
        return self.weight_grad or self.backward / 2

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step by category; they add up to the step."""

    compute: float
    tp_comm: float
    pipeline_wait: float
    dp_comm: float
    optimizer: float
    fixed: float

    @property
    def seconds(self) -> float:
        """All of them."""
        return self.compute + self.tp_comm + self.pipeline_wait + self.dp_comm + self.optimizer + self.fixed


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
        layer_compute(*given), layer_collectives(*given), embedding_time(*given), head_time(*given)
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
    return StepTime(
        compute=busy_s - tp_comm_s,
        tp_comm=tp_comm_s,
        pipeline_wait=wait_s + overhead_s,
        dp_comm=grad_reduce_s(
            shape, config, machine, PassTime(layers * layer.forward, layers * layer.backward)
        ),
        optimizer=optimizer_s(shape, config, machine),
        fixed=machine.rates.step_overhead_s,
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
    recomputed = config.recompute_fraction if config.recompute == "layers" else 0.0
    return PassTime(
        _overlapped_max(layer.forward, launch_s),
        _overlapped_max(layer.backward, launch_s * (1.5 + recomputed)),
        layer.weight_grad,
    )


def _overlapped_max(one: float, other: float) -> float:
    """The longer of two that run side by side; if they are equal they delay each other a little."""
    return (one**4 + other**4) ** 0.25


def layer_compute(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns what a layer computes for one microbatch on one rank."""
    tokens, tp, h, f = config.local_tokens(shape), config.tp, shape.hidden, shape.ffn_dim / config.tp
    heads = shape.attention_dim / tp
    groups = max(shape.num_kv_heads / tp, 1) * shape.head_dim
    matmuls = [(heads + 2 * groups, h), (h, heads), (shape.num_up_projections * f, h), (h, f)]
    forward = sum(
        matmul_seconds(machine, tokens, out_dim, in_dim, config.dtype) for out_dim, in_dim in matmuls
    )
    weights = sum(
        matmul_seconds(machine, out_dim, in_dim, tokens, config.dtype) for out_dim, in_dim in matmuls
    )
    backward = weights + sum(
        matmul_seconds(machine, tokens, in_dim, out_dim, config.dtype) for out_dim, in_dim in matmuls
    )
    attention = _attention_time(shape, config, machine, heads)
    rates = machine.rates
    across = (
        HALF_NBYTES
        * tokens
        * h
        / (tp if config.sequence_parallel else 1)
        * rates.residual_passes
        * (1.0 if config.fused_norms else rates.unfused_norm_factor)
    )
    inside = (
        HALF_NBYTES
        * tokens
        * (2 * (heads + 2 * groups) + 1.5 * (shape.num_up_projections + 1) * f)
        * rates.inner_passes
    )
    memory_s = memory_op_seconds(machine, across + inside * (0.7 if config.compiled else 1.0), 8)
    cast_s = _cast_seconds(shape, config, machine)
    recompute_s = (
        attention.forward
        if config.recompute == "attention" and config.attention_kernel in ("eager", "softmax")
        else 0.0
    )
    recompute_s += 0.3 * memory_s if config.recompute == "attention" else 0.0
    recompute_s += memory_s + forward / 2 if config.recompute == "operators" else 0.0
    return PassTime(
        forward + attention.forward + memory_s + cast_s,
        backward + attention.backward + 2 * memory_s + recompute_s + cast_s,
        weights,
    )


def _cast_seconds(shape: ModelShape, config: ParallelConfig, machine: Machine) -> float:
    """Matmul inputs of few bits are read in 16 and written in 8 bits, as they are and transposed."""
    if config.dtype in (HALF_DTYPE, "float16", "float32"):
        return 0.0
    elements = config.local_tokens(shape) * (
        2 * shape.hidden + (shape.attention_dim + shape.ffn_dim) / config.tp
    )
    times = machine.rates.cast_passes * (
        machine.rates.rowwise_cast_factor if config.dtype == "float8_rowwise" else 1.0
    )
    return times * 4 * elements / (machine.device.memory_rate * machine.rates.memory)


def _attention_time(shape: ModelShape, config: ParallelConfig, machine: Machine, heads: float) -> PassTime:
    """A fused kernel computes half of the pairs, those not masked.

    Another one all, and their scores pass through memory.
    """
    tokens = config.local_tokens(shape)
    flops = 4 * tokens * shape.sequence * heads
    if config.attention_kernel not in ("eager", "softmax"):
        return PassTime(
            *(
                attention_seconds(machine, flops / 2, backward=back, kernel=config.attention_kernel)
                for back in (False, True)
            )
        )
    rates = machine.rates
    scores = tokens * shape.sequence * shape.heads / config.tp
    passes = rates.eager_score_passes if config.attention_kernel == "eager" else rates.fused_score_passes
    dtype = "float16" if shape.head_dim % HEAD_DIM_ALIGNMENT == 0 else "float32"
    computed = flops / (machine.peak_flops(dtype) * rates.matmul * 0.7)
    forward = computed + memory_op_seconds(machine, HALF_NBYTES * scores * passes, 4)
    return PassTime(
        forward, 2 * computed + memory_op_seconds(machine, 1.5 * HALF_NBYTES * scores * passes, 6)
    )


def head_time(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns the time of the logits of one microbatch and of their loss.

    In 16 bits whatever the layers use.
    """
    tokens, vocab, h = config.local_tokens(shape), shape.vocab / config.tp, shape.hidden
    loss_nbytes = 6 * tokens * vocab * machine.rates.loss_passes
    forward = matmul_seconds(machine, tokens, vocab, h, HALF_DTYPE) + memory_op_seconds(
        machine, loss_nbytes, 6
    )
    backward = matmul_seconds(machine, tokens, h, vocab, HALF_DTYPE) + matmul_seconds(
        machine, vocab, h, tokens, HALF_DTYPE
    )
    return PassTime(forward, backward + memory_op_seconds(machine, loss_nbytes, 4))


def embedding_time(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns the time of the embedding of one microbatch."""
    return PassTime(memory_op_seconds(machine, 8 * config.local_tokens(shape) * shape.hidden, 6), 0.0)


def layer_collectives(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns the time of a layer's tensor-parallel collectives.

    And of keys and values that attention does not hide.
    """
    tokens, h, tp = config.local_tokens(shape), shape.hidden, config.tp
    exposed = 1 - config.overlap_fraction * min(1.0, machine.rates.tp_overlap)
    gather_s = exposed * all_gather_seconds(
        machine, HALF_NBYTES * tokens * h, tp, config.tp_stride, config.num_ranks
    )
    forward, backward = 4 * gather_s, (5 if config.sequence_parallel else 4) * gather_s
    if config.cp > 1:
        attention = _attention_time(shape, config, machine, shape.attention_dim / tp)
        groups, ulysses_degree = max(shape.num_kv_heads / tp, 1), config.ulysses_degree
        ring_nbytes = (
            2 * HALF_NBYTES * config.micro_batch * shape.sequence * groups * shape.head_dim / ulysses_degree
        )
        seconds = all_gather_seconds(
            machine,
            ring_nbytes,
            config.cp / ulysses_degree,
            config.dp_stride * ulysses_degree,
            config.num_ranks,
        )
        exchange_nbytes = (
            2
            * HALF_NBYTES
            * tokens
            * (shape.attention_dim / tp + max(groups, ulysses_degree) * shape.head_dim)
        )  # q and o; k and v
        exchange_s = all_gather_seconds(
            machine, exchange_nbytes, ulysses_degree, config.dp_stride, config.num_ranks
        )
        forward += max(0.0, seconds - attention.forward) / 2 + exchange_s
        backward += max(0.0, 2 * seconds - attention.backward) / 2 + exchange_s
    return PassTime(forward, backward)


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
    if config.zero_stage < 3 or config.data_parallel_size == 1:
        return PassTime()
    nbytes = HALF_NBYTES * shape.layer_numel / config.tp
    gather_s = all_gather_seconds(
        machine,
        nbytes / HALF_NBYTES * config.param_gather_itemsize,
        config.zero_shard_size,
        config.dp_stride,
        config.num_ranks,
    )
    backward_s = gather_s + all_gather_seconds(
        machine,
        nbytes / HALF_NBYTES * config.grad_reduce_itemsize,
        config.zero_shard_size,
        config.dp_stride,
        config.num_ranks,
    )
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


def _local_numel(shape: ModelShape, config: ParallelConfig) -> float:
    tables = 2 if (config.pp == 1 and not shape.tied) or config.schedule_profile.is_bidirectional else 1
    layers = config.max_layers_per_rank(shape) * (2 if config.schedule_profile.is_bidirectional else 1)
    return (layers * shape.layer_numel + tables * shape.embedding_numel) / config.tp


def grad_reduce_s(
    shape: ModelShape, config: ParallelConfig, machine: Machine, overlapping: PassTime
) -> float:
    """Returns the exposed seconds of gradient reduction and of gathering sharded weights.

    Sharded gradients are reduced after every microbatch, others once; with several ZeRO groups the shards
    are also reduced across them. In a bidirectional schedule two ranks have the same stage.
    """
    local_numel, ranks = _local_numel(shape, config), config.num_ranks
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
    shard_nbytes = local_numel * config.grad_reduce_itemsize / config.zero_shard_size
    group_s = (
        2
        * all_gather_seconds(machine, shard_nbytes, groups, config.dp_stride * config.zero_shard_size, ranks)
        * (1 - overlap)
        + pair_s
    )
    numel = local_numel if config.zero_stage < 3 else 2 * shape.embedding_numel / config.tp
    reduce_s = all_gather_seconds(
        machine, numel * config.grad_reduce_itemsize, config.zero_shard_size, config.dp_stride, ranks
    )
    gather_s = all_gather_seconds(
        machine, numel * HALF_NBYTES, config.zero_shard_size, config.dp_stride, ranks
    )
    if config.zero_stage == 3:
        return reduce_s + gather_s + group_s
    num_reductions = config.num_microbatches if config.zero_stage == 2 else 1
    if not config.overlap_fraction:
        return (num_reductions * reduce_s + gather_s) * (1 - overlap) + group_s
    embedding_share = min(
        1.0, shape.embedding_numel / config.tp / local_numel
    )  # the embedding's come when nothing is left to run beside them
    exposed_s = num_reductions * max(embedding_share * reduce_s, reduce_s - overlap * overlapping.backward)
    return exposed_s + max(embedding_share * gather_s, gather_s - overlap * overlapping.forward) + group_s


def optimizer_s(shape: ModelShape, config: ParallelConfig, machine: Machine) -> float:
    """Returns the seconds in which the optimizer reads and writes its tensors."""
    local_numel = _local_numel(shape, config)
    nbytes = (
        local_numel * ADAMW_NBYTES_PER_PARAM
        if config.zero_stage == 0
        else local_numel * (ADAMW_NBYTES_PER_PARAM / config.zero_shard_size + 4)
    )
    return nbytes / (machine.device.memory_rate * machine.rates.memory)
