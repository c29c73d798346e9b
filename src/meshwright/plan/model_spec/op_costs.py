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
class Line:
    """So many bytes whatever the rows are, so many for each of them, and so many, once, of what is as large as `weights`."""

    fixed: float = 0.0
    each: float = 0.0
    weights: float = 0.0

    def __add__(self, other: "Line") -> "Line":
        return Line(self.fixed + other.fixed, self.each + other.each, self.weights + other.weights)

    def __sub__(self, other: "Line") -> "Line":
        return Line(self.fixed - other.fixed, self.each - other.each, self.weights - other.weights)

    def at(self, rows: int) -> int:
        """The bytes for so many rows."""
        return max(0, round(self.fixed + self.each * rows + self.weights))

    def part(self, rows: int, of: Fraction, weights: Fraction) -> int:
        """The bytes for so many rows on a rank that has so much `of` what there is, and of `weights`."""
        return max(0, self.signed(rows, of, weights))

    def signed(self, rows: int, of: Fraction, weights: Fraction) -> int:
        """The same, below 0 where less is there."""
        return round((self.fixed + self.each * rows) * of + self.weights * weights)


@dataclass(frozen=True)
class Load:
    """What one visit takes: what it hands on and keeps `inside`, and what is on top in its backward.

    `backward` is the most of that without the gradients of weights, `learning` with those that are there by then, and `attending`
    what of `backward` is there while attention's own backward runs: below 0 where more of the inside is gone by then.
    """

    visit: str
    stream: Line
    inside: Line
    backward: Line
    learning: Line
    attending: Line | None = None


@dataclass(frozen=True)
class Weighed:
    """What the visits of a forward take, what `glue` makes and keeps besides, and what the `loss` has on top of its gradient.

    `handed` is what glue has meanwhile, masks among it: a visit that is to be run again keeps what it is given.
    `works` are their operations.
    """

    visits: tuple[Load, ...]
    glue: Line
    loss: Line
    handed: Line = Line()
    works: "Works | None" = None


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
