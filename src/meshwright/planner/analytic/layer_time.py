"""Seconds of a layer, of the embedding and of the head, for one microbatch on one rank.

    a layer, forward     4 or 5 matmuls, attention, memory operations, the collectives of tensor ranks
    backward             each matmul twice, attention 2.5 times; recomputed operations once more
    in float8, float4    matmul inputs are cast; attention, norms and the head stay in 16 bits
    odd head widths      scores of heads no multiple of 8 wide run at float32's speed
    latent attention     queries, keys and values come from narrow tensors (MLA): five matmuls instead of two

The experts of a layer are in expert_time.py.

Papers: D. Narayanan et al. 2021, arXiv 2104.04473, section 3; V. Korthikanti et al. 2022, arXiv 2205.05198,
section 4; latent attention: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.
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
)

HALF_DTYPE = "bfloat16"
# 16-bit elements that units for matrices load at once: heads of another width are computed by those for
# float32
HEAD_DIM_ALIGNMENT = 8


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


def layer_compute(shape: ModelShape, config: ParallelConfig, machine: Machine) -> PassTime:
    """Returns what a layer computes for one microbatch on one rank."""
    tokens, tp, h, f = config.local_tokens(shape), config.tp, shape.hidden, shape.mlp_dim / config.tp
    heads = shape.attention_dim / tp
    groups = max(shape.num_kv_heads / tp, 1) * shape.head_dim
    attention_matmuls = shape.latent_matrices(tp) if shape.kv_rank else [(heads + 2 * groups, h), (h, heads)]
    matmuls = [*attention_matmuls, (shape.num_up_projections * f, h), (h, f)]
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
        2 * shape.hidden + (shape.attention_dim + shape.mlp_dim) / config.tp
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
    mlp = 2 * _mlp_sums(shape, config)
    forward, backward = (2 + mlp) * gather_s, ((3 if config.sequence_parallel else 2) + mlp) * gather_s
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


def _mlp_sums(shape: ModelShape, config: ParallelConfig) -> float:
    """The sums of MLPs over tensor ranks in the mean layer: of a plain MLP, or of shared experts, and of the
    chosen experts, unless all of them are whole on each of these ranks.
    """
    is_divided = config.ep_tp > 1 or (config.expert_tp > 1 and not config.sequence_parallel)
    share = shape.expert_layer_share
    return 1 - share + share * ((shape.shared_ffn > 0) + is_divided)
