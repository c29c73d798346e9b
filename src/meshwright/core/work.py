"""What a block does, operation by operation, as a trial has seen it: enough to say how long it takes on any device.

    products      [m, k] by [k, n], so many of them at once, in a dtype
    attention     fused: rows, heads, queries, keys, width
    passed        all others: bytes that they read and write, and how many numbers those of RICH make

Sizes are lines over the rows of a micro-batch, so that they hold for any number of them. Operations that are alike are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.core.load import Line

# Operations, by torch's names for them, that compute so much for each number that memory does not say what they take on a CPU.
RICH = (
    *("tanh", "exp", "log", "erf", "sin", "cos", "gelu", "gelu_tanh", "gelu_backward", "gelu_tanh_backward", "bernoulli_"),
    *("silu", "silu_backward", "sigmoid", "_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax"),
    *("_log_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"),
)


Pairs = tuple[float, float, float, float, float]  # of attention: rows, heads, queries, keys, width of a head


@dataclass(frozen=True)
class Product:
    """`count` times `batch` products of [m, k] by [k, n] in `dtype`."""

    m: Line
    n: Line
    k: Line
    batch: Line
    dtype: str
    count: int = 1

    @property
    def learns(self) -> bool:
        """Whether rows are summed over, as in the gradient of a weight."""
        return bool(self.k.each) and not (self.m.each or self.n.each or self.batch.each)

    def flops(self, rows: int) -> int:
        """The operations for so many rows; a multiply-add counts as two."""
        return 2 * self.count * self.batch.at(rows) * self.m.at(rows) * self.n.at(rows) * self.k.at(rows)


@dataclass(frozen=True)
class Attention:
    """`count` calls of fused attention, or of its `backward`; `causal`: the kernel leaves out what lies behind a query."""

    rows: Line
    heads: int
    queries: int
    keys: int
    width: int
    dtype: str
    backward: bool = False
    causal: bool = False
    count: int = 1

    def flops(self, rows: int) -> int:
        """The operations for so many rows, no pair left out: two products forward, five backward."""
        pairs = self.rows.at(rows) * self.heads * self.queries * self.keys
        return (10 if self.backward else 4) * self.count * pairs * self.width


@dataclass(frozen=True)
class Passed:
    """`count` operations that read and write so many bytes each; 0: that only look at memory in another way.

    `operation` is one of RICH, and `numbers` are what it makes; "" where bytes say all.
    """

    nbytes: Line
    count: int = 1
    operation: str = ""
    numbers: Line = field(default_factory=Line)


@dataclass(frozen=True)
class Work:
    """The operations of a forward, or of a backward."""

    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    passed: tuple[Passed, ...] = ()

    @property
    def calls(self) -> int:
        """How many operations there are."""
        return sum(each.count for each in (*self.products, *self.attention, *self.passed))

    def flops(self, rows: int) -> int:
        """The floating-point operations of products and attention for so many rows."""
        return sum(each.flops(rows) for each in (*self.products, *self.attention))

    def moved(self, rows: int) -> int:
        """The bytes that the rest reads and writes."""
        return sum(each.count * each.nbytes.at(rows) for each in self.passed)


@dataclass(frozen=True)
class Done:
    """What the forward and the backward of one visit do."""

    visit: str
    forward: Work
    backward: Work


@dataclass(frozen=True)
class Works:
    """What the visits of a forward do, what `glue` does between them, and what the `loss` does forward and backward."""

    visits: tuple[Done, ...]
    glue: Work = Work()
    loss: Work = Work()

    @cached_property
    def by_visit(self) -> Mapping[str, Done]:
        """What each visit does, by its name."""
        return {done.visit: done for done in self.visits}
