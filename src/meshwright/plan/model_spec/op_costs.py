"""What a block does, operation by operation, as a trial has seen it: enough to say how long it takes on any device.

    products      [m, k] by [k, n], so many of them at once, in a dtype
    attention     fused: rows, heads, queries, keys, width
    passed        all others: bytes that they read and write, and how many numbers those of RICH make

Sizes are lines over the rows of a micro-batch, so that they hold for any number of them. Operations that are alike are counted.

Bytes by the number of rows, as a trial has weighed them.

What is as large as a weight is apart, whatever the rows are: gradients of weights, and casts of them. Where weights are divided
among ranks it is divided as they are, which the rest may not be.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class LinearInSamples:
    """So many bytes whatever the rows are, so many for each of them, and so many, once, of what is as large as `weights`."""

    fixed: float = 0.0
    per_sample: float = 0.0
    weight_sized: float = 0.0

    def __add__(self, other: "LinearInSamples") -> "LinearInSamples":
        return LinearInSamples(
            self.fixed + other.fixed,
            self.per_sample + other.per_sample,
            self.weight_sized + other.weight_sized,
        )

    def __sub__(self, other: "LinearInSamples") -> "LinearInSamples":
        return LinearInSamples(
            self.fixed - other.fixed,
            self.per_sample - other.per_sample,
            self.weight_sized - other.weight_sized,
        )

    def total(self, num_samples: int) -> int:
        """The bytes for so many rows."""
        return max(0, round(self.fixed + self.per_sample * num_samples + self.weight_sized))

    def local_total(self, num_samples: int, fraction: Fraction, weight_fraction: Fraction) -> int:
        """The bytes for so many rows on a rank that has so much `of` what there is, and of `weights`."""
        return max(0, self.signed_local_total(num_samples, fraction, weight_fraction))

    def signed_local_total(self, num_samples: int, fraction: Fraction, weight_fraction: Fraction) -> int:
        """The same, below 0 where less is there."""
        return round(
            (self.fixed + self.per_sample * num_samples) * fraction + self.weight_sized * weight_fraction
        )


@dataclass(frozen=True)
class BlockMemory:
    """What one visit takes: what it hands on and keeps `inside`, and what is on top in its backward.

    `backward` is the most of that without the gradients of weights, `learning` with those that are there by then, and `attending`
    what of `backward` is there while attention's own backward runs: below 0 where more of the inside is gone by then.
    """

    block_call: str
    output: LinearInSamples
    saved_activations: LinearInSamples
    backward: LinearInSamples
    backward_with_grads: LinearInSamples
    attention_backward: LinearInSamples | None = None


@dataclass(frozen=True)
class ModelMemory:
    """What the visits of a forward take, what `glue` makes and keeps besides, and what the `loss` has on top of its gradient.

    `handed` is what glue has meanwhile, masks among it: a visit that is to be run again keeps what it is given.
    `works` are their operations.
    """

    block_calls: tuple[BlockMemory, ...]
    glue: LinearInSamples
    loss: LinearInSamples
    glue_outputs: LinearInSamples = LinearInSamples()
    ops: "ModelOps | None" = None


# Operations, by torch's names for them, that compute so much for each number that memory does not say what they take on a CPU.
COMPUTE_HEAVY_OPS = (
    *(
        "tanh",
        "exp",
        "log",
        "erf",
        "sin",
        "cos",
        "gelu",
        "gelu_tanh",
        "gelu_backward",
        "gelu_tanh_backward",
        "bernoulli_",
    ),
    *(
        "silu",
        "silu_backward",
        "sigmoid",
        "_softmax",
        "_safe_softmax",
        "_softmax_backward_data",
        "_log_softmax",
    ),
    *("_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"),
)


AttentionSize = tuple[
    float, float, float, float, float
]  # of attention: rows, heads, queries, keys, width of a head


@dataclass(frozen=True)
class MatmulOp:
    """`count` times `batch` products of [m, k] by [k, n] in `dtype`."""

    m: LinearInSamples
    n: LinearInSamples
    k: LinearInSamples
    batch: LinearInSamples
    dtype: str
    count: int = 1

    @property
    def is_weight_grad(self) -> bool:
        """Whether rows are summed over, as in the gradient of a weight."""
        return bool(self.k.per_sample) and not (
            self.m.per_sample or self.n.per_sample or self.batch.per_sample
        )

    def flops(self, num_samples: int) -> int:
        """The operations for so many rows; a multiply-add counts as two."""
        return (
            2
            * self.count
            * self.batch.total(num_samples)
            * self.m.total(num_samples)
            * self.n.total(num_samples)
            * self.k.total(num_samples)
        )


@dataclass(frozen=True)
class AttentionOp:
    """`count` calls of fused attention, or of its `backward`; `causal`: the kernel leaves out what lies behind a query."""

    batch: LinearInSamples
    num_heads: int
    query_len: int
    key_len: int
    head_dim: int
    dtype: str
    backward: bool = False
    is_causal: bool = False
    count: int = 1

    def flops(self, num_samples: int) -> int:
        """The operations for so many rows, no pair left out: two products forward, five backward."""
        pairs = self.batch.total(num_samples) * self.num_heads * self.query_len * self.key_len
        return (10 if self.backward else 4) * self.count * pairs * self.head_dim


@dataclass(frozen=True)
class MemoryOp:
    """`count` operations that read and write so many bytes each; 0: that only look at memory in another way.

    `operation` is one of RICH, and `numbers` are what it makes; "" where bytes say all.
    """

    nbytes: LinearInSamples
    count: int = 1
    operation: str = ""
    output_numel: LinearInSamples = field(default_factory=LinearInSamples)


@dataclass(frozen=True)
class OpCounts:
    """The operations of a forward, or of a backward."""

    matmuls: tuple[MatmulOp, ...] = ()
    attention: tuple[AttentionOp, ...] = ()
    memory_ops: tuple[MemoryOp, ...] = ()

    @property
    def num_ops(self) -> int:
        """How many operations there are."""
        return sum(each.count for each in (*self.matmuls, *self.attention, *self.memory_ops))

    def flops(self, num_samples: int) -> int:
        """The floating-point operations of products and attention for so many rows."""
        return sum(each.flops(num_samples) for each in (*self.matmuls, *self.attention))

    def memory_op_nbytes(self, num_samples: int) -> int:
        """The bytes that the rest reads and writes."""
        return sum(each.count * each.nbytes.total(num_samples) for each in self.memory_ops)


@dataclass(frozen=True)
class BlockOps:
    """What the forward and the backward of one visit do."""

    block_call: str
    forward: OpCounts
    backward: OpCounts


@dataclass(frozen=True)
class ModelOps:
    """What the visits of a forward do, what `glue` does between them, and what the `loss` does forward and backward."""

    block_calls: tuple[BlockOps, ...]
    glue: OpCounts = OpCounts()
    loss: OpCounts = OpCounts()

    @cached_property
    def by_block_call(self) -> Mapping[str, BlockOps]:
        """What each visit does, by its name."""
        return {done.block_call: done for done in self.block_calls}
