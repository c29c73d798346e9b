"""What the plan needs to know of layers that can be divided: their calls, and what stands round and between them.

A *call* is one call of a layer in one forward; calls have roles. What lies between columns and rows is divided with them, so
modules there hold other *numbers* of heads, and blocks are given *portions* of what has a row per head. The *stream* goes from
block to block in *passages*, and ends in *logits*.
"""

from dataclasses import dataclass

from meshwright.plan.model_spec.dim_split import Cut


@dataclass(frozen=True)
class Formula:
    """What a norm over the last dim computes, as far as it follows (x - mean) / sqrt(variance + eps) * (weight + offset) + bias.

    One that is not `centred` takes the mean of squares for the variance, and no mean. Without an `eps` of its own it takes that
    of the dtype. `width` is the size of the dim.
    """

    centred: bool
    eps: float | None
    offset: float
    width: int

    @property
    def statistics(self) -> int:
        """How many numbers per row it takes of the whole dim."""
        return 2 if self.centred else 1


@dataclass(frozen=True)
class Call:
    """One call of a layer that can be divided: its module, the visit, and its role.

    Roles: "columns" and "rows" of a pair of linear layers, "inside" of what stands between them, "gathered" of a columns
    layer without rows, "table" (an embedding), "head" (the linear layer that makes logits), "lookup" and "logits" (such a table
    or head that cannot be divided by words), "norm" (one over the last dim). `source` numbers the tensors that such layers take
    in: those that take the same one have the same number. `into` and `out` are elements per sample. `needed` tells whether the
    gradient of what goes in is needed.
    `formula` is that of a norm; None where it is not known.
    `streams` tells whether what goes in is the stream, or made of it token by token (see `Passage`). `gate` is a module around it
    that takes in the same tensor, at `slots` among its arguments, and hands it to no others than such layers.
    `sum` numbers the sums that several rows layers end in: they have the same number, and their outputs meet in additions alone;
    0: what it gives out is for itself.
    `flops` and `inside` are the operations and the kept elements of its visit that are divided with it (model/stretches.py), per
    sample: its own, and of a rows layer what lies between it and its columns layers.
    """

    name: str
    visit: str
    role: str
    source: int
    into: int
    out: int
    needed: bool = True
    formula: Formula | None = None
    streams: bool = False
    gate: str = ""
    slots: tuple[int | str, ...] = ()
    flops: int = 0
    inside: int = 0
    sum: int = 0


@dataclass(frozen=True)
class Number:
    """A number that a module holds of heads or features that are divided, as `cut` is (its dim is 0): it must be the rank's own.

    `name` is the attribute; "config.x" is that of a config that the module holds. With `over` the number is how many of the one
    there are for each of the other.
    """

    module: str
    name: str
    cut: Cut
    over: Cut | None = None

    def local(self, index: int, ranks: int) -> int:
        """What the rank at `index` among `ranks` holds."""
        count = self.cut.size(index, ranks)
        return count if self.over is None else count // self.over.size(index, ranks)


@dataclass(frozen=True)
class Portion:
    """A tensor by head that a block is given, at `slot` among its arguments (a position, a keyword): a rank takes its heads."""

    block: str
    slot: int | str
    cut: Cut


@dataclass(frozen=True)
class Passage:
    """How the stream, [rows, tokens, width], goes through a visit that gives out what has the shape of what it takes in.

    `slot` is where it stands among the visit's arguments: a position, or a keyword; `place` is where among its outputs, None
    where that is the only one. `source` is the visit that has given it out as it is taken, `onward` the one that alone takes what
    comes out, as it is; empty: glue computes with it, or several take it. `needed` tells whether the gradient of what goes in is
    needed. `mixes` says what keeps the visit from running on a slice of the tokens; empty: nothing, but for what lies between
    columns and rows.
    """

    visit: str
    slot: int | str
    place: int | None
    tokens: int
    width: int
    source: str = ""
    onward: str = ""
    needed: bool = True
    mixes: str = ""


@dataclass(frozen=True)
class Logits:
    """What a head gives out and the loss takes, where the loss can take it divided by words.

    `layer` is the head and `weight` what it multiplies with, by logical name; `words` are how many there are, `tokens` how many
    rows of logits a sample has. Of each of those the ranks tell each other so many `numbers`. `changed` is the first operation
    between the head and the loss that changes them; empty: there is none.
    """

    layer: str
    weight: str
    words: int
    tokens: int
    numbers: int
    changed: str = ""
