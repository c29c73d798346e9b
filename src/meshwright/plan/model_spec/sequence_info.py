"""Describes what a model does along the sequence dim: attention, convolutions, glue that gathers tokens."""

from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class AttentionMaskSpec:
    """The dims in which an attention mask varies besides the keys; it has size 1 along the others.

    `is_additive`: the mask is added to the scores, otherwise it is boolean. `is_replicated`: the block
    receives a mask that glue computed in full on every rank.
    """

    per_sample: bool = False
    per_head: bool = False
    per_query: bool = True
    is_additive: bool = False
    needs_grad: bool = False
    is_replicated: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """One attention call in one forward: its block call, and the sizes of its inputs per sample.

    `head_dim` is that of queries and keys, `value_head_dim` that of values; `query_len` and `key_len` are
    tokens. `has_mask`: it takes a mask [.., queries, keys], described by `mask`. `needs_grad`: some input
    needs its gradient; `qkv_need_grad` tells which of queries, keys and values do.
    """

    block_call: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    query_len: int
    key_len: int
    is_causal: bool = False
    has_mask: bool = False
    needs_grad: bool = True
    mask: AttentionMaskSpec | None = None
    qkv_need_grad: tuple[bool, bool, bool] = (True, True, True)


@dataclass(frozen=True)
class ConvSpec:
    """One convolution along the sequence, in `module` of a block call: output i reads tokens i - `left_halo`
    to i + `right_halo`.

    Each sample has `num_tokens` tokens of `token_numel` elements, with `pad_before` and `pad_after` zeros
    around them; the output has `num_extra_outputs` elements after its tokens, which the model does not use.
    Before it, the block call runs `num_prior_attention_calls` attention calls and the layers `prior_layers`.
    A halo of 0 on both sides: it treats each token by itself, or has no tokens.
    """

    block_call: str
    module: str
    num_tokens: int = 0
    token_numel: int = 0
    left_halo: int = 0
    right_halo: int = 0
    pad_before: int = 0
    pad_after: int = 0
    num_extra_outputs: int = 0
    needs_grad: bool = False
    num_prior_attention_calls: int = 0
    prior_layers: tuple[str, ...] = ()

    @property
    def halo(self) -> int:
        """The number of other tokens that one output reads."""
        return self.left_halo + self.right_halo


@dataclass(frozen=True)
class GatheredValue:
    """A tensor [samples, tokens, ..] with `token_numel` numbers per token, of which ranks gather those of all
    tokens.
    """

    token_numel: int
    is_float: bool
    needs_grad: bool


@dataclass(frozen=True)
class SampleGather:
    """A call of `module` (`nn.WholeSamples`) in a block call, that computes of the `values` of all tokens of
    a sample: `num_tokens`.

    Before it, the block call runs `num_prior_attention_calls` attention calls and the layers `prior_layers`.
    """

    block_call: str
    module: str
    num_tokens: int
    values: tuple[GatheredValue, ...]
    num_prior_attention_calls: int = 0
    prior_layers: tuple[str, ...] = ()

    @property
    def needs_grad(self) -> bool:
        """Whether some value needs its gradient."""
        return any(value.needs_grad for value in self.values)


@dataclass(frozen=True)
class CapturedTokens:
    """The tokens of a tensor that a block call puts into a side channel: `num_tokens` per sample along `dim`.

    `is_merged`: the dim holds samples and tokens, first all tokens of the first sample. `needs_grad`: the
    loss may depend on it.
    """

    dim: int
    num_tokens: int
    is_merged: bool = False
    needs_grad: bool = True


@dataclass(frozen=True)
class BlockSequenceInfo:
    """The sequence dims of the inputs and outputs of a block call, one tuple of dims per tensor, in order.

    `arg_paths` are the positions of the inputs among its arguments (others may stand there for another
    batch). `not_sequence_parallel` says why the block call cannot run on a sequence shard ("": it can,
    attention apart). `is_replicated`: every rank runs it on all tokens, because it only takes inputs that
    every rank reads, and continues with its own. `input_num_tokens` and `output_num_tokens` are their tokens
    per sample, 0 for a tensor without tokens; empty: `SequenceInfo.length`. `module_num_tokens` names modules
    that see another number of tokens than the block call returns (keys of an encoder), with that number.
    `captured` describes the tensors of its side channels, in order; None for one without tokens of this rank.
    """

    block_call: str
    input_token_dims: tuple[tuple[int, ...], ...] = ()
    output_token_dims: tuple[tuple[int, ...], ...] = ()
    not_sequence_parallel: str = ""
    arg_paths: tuple[str, ...] = ()
    is_replicated: bool = False
    input_num_tokens: tuple[int, ...] = ()
    output_num_tokens: tuple[int, ...] = ()
    module_num_tokens: tuple[tuple[str, int], ...] = ()
    captured: tuple[CapturedTokens | None, ...] = ()

    def with_lengths(self, length: int) -> "BlockSequenceInfo":
        """Returns the same with explicit token counts, in a model whose `SequenceInfo.length` is `length`."""
        inputs = self.input_num_tokens or (length,) * len(self.input_token_dims)
        outputs = self.output_num_tokens or (length,) * len(self.output_token_dims)
        return replace(self, input_num_tokens=inputs, output_num_tokens=outputs)

    def without_captured_grad(self) -> "BlockSequenceInfo":
        """Returns the same for a loss that depends on no tensor of a side channel."""
        captured = tuple(each and replace(each, needs_grad=False) for each in self.captured)
        return replace(self, captured=captured)

    def num_sharded_tokens(self, length: int) -> int:
        """Returns the tokens per sample of which each rank runs a shard; 0: every rank runs all."""
        complete = self.with_lengths(length)
        found = [
            *zip(complete.output_token_dims, complete.output_num_tokens, strict=True),
            *zip(complete.input_token_dims, complete.input_num_tokens, strict=True),
        ]
        return 0 if self.is_replicated else next((count for dims, count in found if dims), 0)


@dataclass(frozen=True)
class GlueGather:
    """A tensor that glue needs for all tokens: the block call after which it is gathered ("": in the loss),
    elements per sample.

    With `num_tokens`, each rank contributes its tokens and receives all; with 0, each contributes a summand
    and receives the sum. `per_sample`: the size grows with the samples; otherwise `numel` is all of it.
    `backward_calls` are the block calls in whose backward its gradient is reduced (empty: in that of the
    loss). `dtype` is set if it is not the job's. `consumer` is the block call that receives it; "" if glue
    does.
    """

    block_call: str
    numel: int
    num_tokens: int = 0
    per_sample: bool = True
    backward_calls: tuple[str, ...] = ()
    dtype: str = ""
    consumer: str = ""


@dataclass(frozen=True)
class SequenceInfo:
    """The use of the sequence by a model: tokens per sample, and the `inputs` and `targets` that have them
    (along dim 1).

    `gathers` are what glue needs of all tokens, in order; `batch_dependent_reason` says why that differs
    between batches ("": it does not). `reads_values`: glue or the loss reads values of a batch, so another
    batch may take another path. `has_untracked_writes`: glue obtains memory whose writes cannot be observed.
    Tokens may begin inside the model, where a block takes what was made of an image. Samples may have several
    lengths: `other_lengths` are the inputs and targets with another number of tokens, and that number.
    """

    length: int
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    block_calls: tuple[BlockSequenceInfo, ...] = ()
    attention_calls: tuple[AttentionSpec, ...] = ()
    gathers: tuple[GlueGather, ...] = ()
    batch_dependent_reason: str = ""
    reads_values: bool = False
    other_lengths: tuple[tuple[str, int], ...] = ()
    conv_calls: tuple[ConvSpec, ...] = ()
    sample_gathers: tuple[SampleGather, ...] = ()
    has_untracked_writes: bool = False

    def num_tokens_in(self, name: str) -> int:
        """Returns the number of tokens of an input or target."""
        return dict(self.other_lengths).get(name, self.length)

    def num_sharded_tokens(self, block_call: str, module: str = "") -> int:
        """Returns the tokens per sample of which each rank runs a shard in a block call or its `module`; 0:
        every rank runs all.
        """
        return self._module_token_counts.get((block_call, module), self._runs.get(block_call, self.length))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """All token counts in a sample, `length` first."""
        found = [self.length, *(count for _, count in self.other_lengths), *self._runs.values()]
        found += [count for attend in self.attention_calls for count in (attend.query_len, attend.key_len)]
        return tuple(dict.fromkeys(filter(None, found)))

    @cached_property
    def _module_token_counts(self) -> dict[tuple[str, str], int]:
        return {
            (info.block_call, name): count
            for info in self.block_calls
            for name, count in info.module_num_tokens
        }

    @cached_property
    def _runs(self) -> dict[str, int]:
        return {info.block_call: info.num_sharded_tokens(self.length) for info in self.block_calls}
