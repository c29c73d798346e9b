"""Counts the operations and bytes of each block call, as measured on a fake-tensor trial, for any number of
samples.

    matmuls       [m, k] by [k, n], `batch` of them at once, in a dtype
    attention     fused: batch, heads, query and key lengths, head dim
    memory_ops    all others: bytes read and written, and the outputs of compute-heavy ones

Sizes are linear in the samples of a microbatch, so they hold for any microbatch. Equal operations are
counted. Quantities as large as parameters are kept apart, because they do not depend on samples: gradients of
parameters and casts of them. They are sharded as the parameters are, which the rest may not be.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property


@dataclass(frozen=True)
class LinearInSamples:
    """A quantity `fixed + per_sample * samples + weight_sized`; the last part is as large as parameters."""

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
        """Returns the quantity for `num_samples` samples, at least 0."""
        return max(0, round(self.fixed + self.per_sample * num_samples + self.weight_sized))

    def local_total(self, num_samples: int, fraction: Fraction, weight_fraction: Fraction) -> int:
        """Returns the quantity on a rank with `fraction` of the activations and `weight_fraction` of the
        parameters, at least 0.
        """
        return max(0, self.signed_local_total(num_samples, fraction, weight_fraction))

    def signed_local_total(self, num_samples: int, fraction: Fraction, weight_fraction: Fraction) -> int:
        """As `local_total`, but negative if less is needed."""
        return round(
            (self.fixed + self.per_sample * num_samples) * fraction + self.weight_sized * weight_fraction
        )


KEPT_OPS = ("matmul", "attention")  # kinds of operations whose outputs a checkpointed block call may keep
WIDE_NBYTES = 4  # of a log-sum-exp in half precision


@dataclass(frozen=True)
class KeptOutputs:
    """What the operations `op` of `block_call` return, in elements per sample, where a checkpointed block
    call keeps it: "matmul", or "attention" with its log-sum-exp.

    `numel` have the compute dtype, `wide_numel` float32 at least; of these autograd saves `saved_numel` and
    `wide_saved_numel`. `flops` are their operations. They are sharded with `layer`; of a sum (`is_sum`), in
    which a rowwise layer ends, each rank has a summand of every element. What the block overwrites is none of
    them.
    """

    block_call: str
    op: str
    numel: int
    saved_numel: int
    wide_numel: int = 0
    wide_saved_numel: int = 0
    flops: int = 0
    layer: str = ""
    is_sum: bool = False

    def nbytes(self, width: int) -> int:
        """Returns the bytes of a sample in a compute dtype of `width` bytes."""
        return self.numel * width + self.wide_numel * max(width, WIDE_NBYTES)

    def saved_nbytes(self, width: int) -> int:
        """Returns the bytes of those that autograd saves."""
        return self.saved_numel * width + self.wide_saved_numel * max(width, WIDE_NBYTES)


@dataclass(frozen=True)
class UnreadProduct:
    """A layer whose matrix product is the last thing in `block_call` that a backward may need: nothing saves
    what it returns, or what follows from it. `flops` are its operations per sample.
    """

    block_call: str
    layer: str
    flops: int


@dataclass(frozen=True)
class AroundExperts:
    """Bytes of a block call without those that its calls of experts save.

    `saved_by_experts` are these, as the trial ran them. Beside the saved activations of the rest there are
    `at_forward` when experts are called, and `at_backward` when their backward begins. `peak` is the most
    outside of experts until then, in the forward too, and `late_peak` the most after their backward;
    `late_peak_with_grads` includes the gradients of parameters that exist at that moment.
    """

    saved_by_experts: LinearInSamples
    at_forward: LinearInSamples
    at_backward: LinearInSamples
    peak: LinearInSamples
    late_peak: LinearInSamples
    late_peak_with_grads: LinearInSamples


@dataclass(frozen=True)
class ExpertsMemory:
    """Bytes of the experts `name` for pairs of a token and an expert that compute on a row each.

    Quantities are linear in pairs, as others are in samples. `forward` is the peak of a forward, with its
    input and output; `saved_activations` is what it saves. `backward` is the peak of a backward beside these,
    with the gradients of the output and the input; `backward_with_grads` includes the gradients of parameters
    that exist at that moment. A row of the input takes `row_nbytes`.
    """

    name: str
    row_nbytes: int
    forward: LinearInSamples
    saved_activations: LinearInSamples
    backward: LinearInSamples
    backward_with_grads: LinearInSamples


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block call: its output, its saved activations, and the extra memory of its backward.

    `backward` is the peak of the extra memory without gradients of parameters, `backward_with_grads` with
    those that exist by then, `attention_backward` the extra memory while the backward of attention runs:
    below 0 if more of the saved activations has been freed by then. `around_experts` is set if it calls
    experts.
    """

    block_call: str
    output: LinearInSamples
    saved_activations: LinearInSamples
    backward: LinearInSamples
    backward_with_grads: LinearInSamples
    attention_backward: LinearInSamples | None = None
    around_experts: AroundExperts | None = None


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of the block calls of a forward, of what `glue` keeps, and of the loss beyond its gradient.

    `glue_outputs` are bytes that glue computes for blocks, masks among them: a checkpointed block call keeps
    its inputs. `ops` are the operations, `experts` the modules of experts that could be measured.
    """

    block_calls: tuple[BlockMemory, ...]
    glue: LinearInSamples
    loss: LinearInSamples
    glue_outputs: LinearInSamples = LinearInSamples()
    ops: "ModelOps | None" = None
    experts: tuple[ExpertsMemory, ...] = ()


# Operations, by their names in torch, whose time on a CPU is not determined by the bytes they read and write.
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


# Of attention: batch, heads, query length, key length, head dim.
AttentionSize = tuple[float, float, float, float, float]


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
        """Whether the product sums over samples, as for the gradient of a weight."""
        return bool(self.k.per_sample) and not (
            self.m.per_sample or self.n.per_sample or self.batch.per_sample
        )

    def flops(self, num_samples: int) -> int:
        """Returns the operations for `num_samples` samples; a multiply-add counts as two."""
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
    """`count` calls of fused attention, or of its `backward`; `is_causal`: the kernel skips keys after the
    query.
    """

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
        """Returns the operations for `num_samples` samples without skipped pairs: two products forward, five
        backward.
        """
        pairs = self.batch.total(num_samples) * self.num_heads * self.query_len * self.key_len
        return (10 if self.backward else 4) * self.count * pairs * self.head_dim


@dataclass(frozen=True)
class MemoryOp:
    """`count` operations that read and write `nbytes` each; 0 for a view.

    `operation` is one of COMPUTE_HEAVY_OPS, with `output_numel` elements of output; "" if the bytes determine
    the time.
    """

    nbytes: LinearInSamples
    count: int = 1
    operation: str = ""
    output_numel: LinearInSamples = field(default_factory=LinearInSamples)


@dataclass(frozen=True)
class OpCounts:
    """The operations of a forward or of a backward."""

    matmuls: tuple[MatmulOp, ...] = ()
    attention: tuple[AttentionOp, ...] = ()
    memory_ops: tuple[MemoryOp, ...] = ()

    def subtract(self, ops: Collection[str]) -> "OpCounts":
        """Returns the operations without those of the kinds `ops` of KEPT_OPS."""
        matmuls = () if "matmul" in ops else self.matmuls
        return OpCounts(matmuls, () if "attention" in ops else self.attention, self.memory_ops)

    def without_product(self, flops: int) -> "OpCounts":
        """Returns the operations without one matrix product of `flops` operations per sample; all if there is
        none.
        """
        found = next((each for each in self.matmuls if each.flops(1) == flops * each.count), None)
        others = tuple(each for each in self.matmuls if each is not found)
        if found is None:
            return self
        rest = (replace(found, count=found.count - 1),) if found.count > 1 else ()
        return replace(self, matmuls=(*others, *rest))

    @property
    def num_ops(self) -> int:
        """The number of operations."""
        return sum(each.count for each in (*self.matmuls, *self.attention, *self.memory_ops))

    def flops(self, num_samples: int) -> int:
        """Returns the floating-point operations of matmuls and attention for `num_samples` samples."""
        return sum(each.flops(num_samples) for each in (*self.matmuls, *self.attention))

    def memory_op_nbytes(self, num_samples: int) -> int:
        """Returns the bytes that the other operations read and write."""
        return sum(each.count * each.nbytes.total(num_samples) for each in self.memory_ops)


@dataclass(frozen=True)
class BlockOps:
    """The operations of the forward and the backward of one block call."""

    block_call: str
    forward: OpCounts
    backward: OpCounts


@dataclass(frozen=True)
class ModelOps:
    """The operations of all block calls, of `glue` between them, and of the `loss`."""

    block_calls: tuple[BlockOps, ...]
    glue: OpCounts = OpCounts()
    loss: OpCounts = OpCounts()

    @cached_property
    def by_block_call(self) -> Mapping[str, BlockOps]:
        """The operations by block call."""
        return {done.block_call: done for done in self.block_calls}
