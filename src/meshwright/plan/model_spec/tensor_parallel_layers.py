"""Describes the layers that tensor parallelism can shard, and what lies around and between them.

A *layer call* is one call of such a layer in one forward; it has a role. What lies between a colwise and a
rowwise layer is sharded with them: modules there hold local numbers of heads (`SizeAttribute`), and blocks
receive the local heads of per-head tensors (`PerHeadInput`). The residual stream goes from block to block
(`ResidualFlow`) and ends in the logits (`LogitsSpec`).
"""

from dataclasses import dataclass

from meshwright.plan.model_spec.param_dim_split import DimSplit


@dataclass(frozen=True)
class NormFormula:
    """The formula of a norm over the last dim: (x - mean) / sqrt(variance + eps) * (weight + weight_offset) +
    bias.

    Without `subtracts_mean` the variance is the mean of squares and no mean is subtracted (RMSNorm). `eps`
    None means the eps of the dtype. `normalized_size` is the size of the dim.
    """

    subtracts_mean: bool
    eps: float | None
    weight_offset: float
    normalized_size: int

    @property
    def num_statistics(self) -> int:
        """The number of values per token that need a reduction over the whole dim."""
        return 2 if self.subtracts_mean else 1


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer that can be sharded: its module, the block call, and its role.

    Roles: "colwise" and "rowwise" for a pair of linear layers, "between_pair" for a layer between them,
    "colwise_gather_output" for a colwise layer without a rowwise partner, "embedding", "lm_head" (the linear
    layer that computes logits), "embedding_unsharded" and "lm_head_unsharded" (their vocabulary dim cannot be
    sharded), "norm" (a norm over the last dim).

    `input_id` numbers the input tensors: layers with the same input have the same number. `in_numel` and
    `out_numel` are elements per sample. `input_needs_grad`: the gradient of the input is needed.
    `norm_formula` is None if unknown. `takes_residual`: the input is the residual stream, or computed from it
    token by token (see `ResidualFlow`). `outer_module` is a module around the layer that receives the same
    tensor, at `outer_args` among its arguments, and passes it only to such layers. `sum_id` numbers sums:
    rowwise layers with the same number only meet in one sum; 0 means that the output stands alone. `flops`
    and `saved_numel` are the operations and the saved activations of the block call, per sample, that are
    sharded with this layer: its own, and for a rowwise layer those between it and its colwise layers.
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
    """A module attribute that counts sharded heads or features, split by `dim_split` (dim 0): it must hold
    the local count.

    `name` is the attribute; "config.x" is one of a config that the module holds. With `divisor_split` the
    attribute is the ratio of the two counts (query heads per key head).
    """

    module: str
    name: str
    dim_split: DimSplit
    divisor_split: DimSplit | None = None

    def local_value(self, index: int, num_ranks: int) -> int:
        """Returns the value on rank `index` of `num_ranks`."""
        count = self.dim_split.size(index, num_ranks)
        return count if self.divisor_split is None else count // self.divisor_split.size(index, num_ranks)


@dataclass(frozen=True)
class PerHeadInput:
    """A per-head tensor among the arguments of a block, at `arg` (position or keyword): a rank takes its own
    heads.
    """

    block: str
    arg: int | str
    dim_split: DimSplit


@dataclass(frozen=True)
class ResidualFlow:
    """The residual stream [samples, tokens, hidden] through a block call whose output has the shape of its
    input.

    `arg` is its position or keyword among the arguments, `output_index` its index among the outputs (None:
    the only output). `producer` is the block call whose output arrives unchanged, `consumer` the only one
    that takes the output unchanged; "" if glue computes with it or several block calls take it.
    `not_sequence_parallel` says why the block call cannot run on a sequence shard ("": it can, except between
    colwise and rowwise layers).
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
    """The logits that a head returns and the loss takes, if the loss can take them sharded along the
    vocabulary.

    `layer` is the head, `param` the logical name of its weight; `num_tokens` is the number of logit rows per
    sample. Ranks exchange `num_reduced_values` numbers per token. `modified_by` names the first operation
    between head and loss that changes the logits ("": none).
    """

    layer: str
    param: str
    vocab_size: int
    num_tokens: int
    num_reduced_values: int
    modified_by: str = ""
