"""What the plan needs to know of layers that can be divided: their calls, and what stands round and between them.

A *call* is one call of a layer in one forward; calls have roles. What lies between columns and rows is divided with them, so
modules there hold other *numbers* of heads, and blocks are given *portions* of what has a row per head. The *stream* goes from
block to block in *passages*, and ends in *logits*.
"""

from dataclasses import dataclass

from meshwright.plan.model_spec.dim_split import DimSplit


@dataclass(frozen=True)
class NormFormula:
    """What a norm over the last dim computes, as far as it follows (x - mean) / sqrt(variance + eps) * (weight + offset) + bias.

    One that is not `centred` takes the mean of squares for the variance, and no mean. Without an `eps` of its own it takes that
    of the dtype. `width` is the size of the dim.
    """

    subtracts_mean: bool
    eps: float | None
    weight_offset: float
    normalized_size: int

    @property
    def num_statistics(self) -> int:
        """How many numbers per row it takes of the whole dim."""
        return 2 if self.subtracts_mean else 1


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer that can be divided: its module, the visit, and its role.

    Roles: "colwise" and "rowwise" of a pair of linear layers, "between_pair" of what stands between them, "colwise_gather_output" of a columns
    layer without rows, "embedding" (an embedding), "lm_head" (the linear layer that makes logits), "embedding_unsharded" and "lm_head_unsharded" (such a table
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
    block_call: str
    role: str
    input_id: int
    in_numel: int
    out_numel: int
    input_needs_grad: bool = True
    norm_formula: NormFormula | None = None
    takes_residual: bool = False
    outer_module: str = ""
    outer_args: tuple[int | str, ...] = ()
    flops: int = 0
    saved_numel: int = 0
    sum_id: int = 0


@dataclass(frozen=True)
class SizeAttribute:
    """A number that a module holds of heads or features that are divided, as `cut` is (its dim is 0): it must be the rank's own.

    `name` is the attribute; "config.x" is that of a config that the module holds. With `over` the number is how many of the one
    there are for each of the other.
    """

    module: str
    name: str
    dim_split: DimSplit
    divisor_split: DimSplit | None = None

    def local_value(self, index: int, num_ranks: int) -> int:
        """What the rank at `index` among `ranks` holds."""
        count = self.dim_split.size(index, num_ranks)
        return count if self.divisor_split is None else count // self.divisor_split.size(index, num_ranks)


@dataclass(frozen=True)
class PerHeadInput:
    """A tensor by head that a block is given, at `slot` among its arguments (a position, a keyword): a rank takes its heads."""

    block: str
    arg: int | str
    dim_split: DimSplit


@dataclass(frozen=True)
class ResidualFlow:
    """How the stream, [rows, tokens, width], goes through a visit that gives out what has the shape of what it takes in.

    `slot` is where it stands among the visit's arguments: a position, or a keyword; `place` is where among its outputs, None
    where that is the only one. `source` is the visit that has given it out as it is taken, `onward` the one that alone takes what
    comes out, as it is; empty: glue computes with it, or several take it. `needed` tells whether the gradient of what goes in is
    needed. `mixes` says what keeps the visit from running on a slice of the tokens; empty: nothing, but for what lies between
    columns and rows.
    """

    block_call: str
    arg: int | str
    output_index: int | None
    num_tokens: int
    hidden_size: int
    producer: str = ""
    consumer: str = ""
    input_needs_grad: bool = True
    not_sequence_parallel: str = ""


@dataclass(frozen=True)
class LogitsSpec:
    """What a head gives out and the loss takes, where the loss can take it divided by words.

    `layer` is the head and `weight` what it multiplies with, by logical name; `words` are how many there are, `tokens` how many
    rows of logits a sample has. Of each of those the ranks tell each other so many `numbers`. `changed` is the first operation
    between the head and the loss that changes them; empty: there is none.
    """

    layer: str
    param: str
    vocab_size: int
    num_tokens: int
    num_reduced_values: int
    modified_by: str = ""
