"""The tokens of one sample on several ranks: which of them each has, and what the plan needs to know of a model for that.

    length 8, 2 ranks, folded          chunks 0 1 2 3        rank 0: 0 1 | 6 7        rank 1: 2 3 | 4 5
    the same, straight                                       rank 0: 0 1 2 3          rank 1: 4 5 6 7
    the same, striped                                        rank 0: 0 2 4 6          rank 1: 1 3 5 7

Under a causal mask token i looks at i others: of straight slices the last costs (2 n - 1) times the first. Folded, each rank has
an early chunk and the late one that makes up for it. Striped, each has its share of every stretch of neighbouring tokens: of a
window, of a document, wherever those begin.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

TokenRange = tuple[int, int]  # the first position, and the one behind the last
PADDING_RANGE: TokenRange = (
    0,
    1,
)  # what a rank runs besides that has too few tokens: the first one, of which nothing counts
MIN_TOKENS = (
    2  # tokens that a rank runs: none does not go through a model, and one looks like a step of a generation
)


@dataclass(frozen=True)
class SequenceSharding:
    """How the tokens of a sample are dealt to `ranks`: chunks are `folded` over ranks / inner, and what each gets lies straight
    on `inner` ranks in turn. With `striped` single tokens go to those ranks / inner in turn instead.

    Any length is dealt as evenly as can be; where it is below the number of ranks, some have none. A rank that has fewer than
    two runs stand-ins behind them: nobody attends to those, and what comes out of them is dropped.
    """

    num_ranks: int
    num_inner_ranks: int = 1
    zigzag: bool = True
    striped: bool = False

    def token_ranges(self, length: int, index: int) -> tuple[TokenRange, ...]:
        """The positions that the rank at `index` has, in order."""
        outer, place = divmod(index, self.num_inner_ranks)
        around = self.num_ranks // self.num_inner_ranks
        mine = self._around(length, outer, around)
        return select_positions(mine, *_piece(num_positions(mine), self.num_inner_ranks, place))

    def num_tokens(self, length: int, index: int) -> int:
        """How many tokens that are."""
        return self.num_tokens_by_rank(length)[index]

    def num_tokens_by_rank(self, length: int) -> tuple[int, ...]:
        """How many each rank has."""
        return _counts(self, length)

    @property
    def max_ranges(self) -> int:
        """How many spans a rank has at most, unless tokens are `striped`."""
        return 2 if self.zigzag and self.num_ranks > self.num_inner_ranks else 1

    def num_padded_tokens(self, length: int, index: int) -> int:
        """How many tokens it runs."""
        return max(MIN_TOKENS, self.num_tokens(length, index))

    def inner_group_ranges(self, length: int, index: int) -> tuple[TokenRange, ...]:
        """The positions that the `inner` ranks round the one at `index` have among them, in order."""
        return self._around(length, index // self.num_inner_ranks, self.num_ranks // self.num_inner_ranks)

    def _around(self, length: int, index: int, num_ranks: int) -> tuple[TokenRange, ...]:
        if self.striped and num_ranks > 1:
            return tuple((at, at + 1) for at in range(index, length, num_ranks))
        if not self.zigzag or num_ranks == 1:
            return tuple(span for span in (_piece(length, num_ranks, index),) if span[0] < span[1])
        counts = [
            end - begin for begin, end in (_piece(length, num_ranks, each) for each in range(num_ranks))
        ]
        first = sum((each + 1) // 2 for each in counts[:index])
        last = length - sum(each // 2 for each in counts[:index])
        early, late = (first, first + (counts[index] + 1) // 2), (last - counts[index] // 2, last)
        if early[1] == late[0]:
            early, late = (early[0], late[1]), (late[1], late[1])
        return tuple(span for span in (early, late) if span[0] < span[1])


def num_positions(spans: Iterable[TokenRange]) -> int:
    """How many positions there are in `spans`."""
    return sum(end - begin for begin, end in spans)


def with_padding(spans: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
    """`spans`, and the stand-ins that are run behind them."""
    return (*spans, *[PADDING_RANGE] * (MIN_TOKENS - num_positions(spans)))


@lru_cache(maxsize=256)  # attention asks for it in every call
def _counts(sequence_sharding: SequenceSharding, length: int) -> tuple[int, ...]:
    return tuple(
        num_positions(sequence_sharding.token_ranges(length, index))
        for index in range(sequence_sharding.num_ranks)
    )


def _piece(length: int, num_chunks: int, index: int) -> TokenRange:
    return length * index // num_chunks, length * (index + 1) // num_chunks


def select_positions(spans: Sequence[TokenRange], first: int, last: int) -> tuple[TokenRange, ...]:
    """Of the positions in `spans`, counted on, those from `first` up to `last`."""
    found, before = [], 0
    for begin, end in spans:
        low, high = max(begin, begin + first - before), min(end, begin + last - before)
        if low < high:
            found.append((low, high))
        before += end - begin
    return tuple(found)


@dataclass(frozen=True)
class AttentionMaskSpec:
    """By what the mask of a call of attention differs, beside keys; it has size 1 along the others.

    It `adds` to scores; otherwise it is one of bools. `needed`: its gradient is. `known`: the block is given it as it is, by glue
    that has made all of it on every rank.
    """

    per_sample: bool = False
    per_head: bool = False
    per_query: bool = True
    is_additive: bool = False
    needs_grad: bool = False
    is_replicated: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """One call of attention in one forward: its visit, and of one sample the sizes of what it takes in.

    `heads` are those of queries, `groups` those of keys and values; `width` is that of a head of queries and keys, `values` is
    that of one of values. `queries` and `keys` are tokens. `masked`: it takes in a mask, [.., queries, keys]; `mask` tells more.
    `needed`: the gradient of something that it takes in is; `learns` tells whether that of queries, of keys, of values are.
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
    """One convolution in one forward, in its `module` of a visit: of token i it takes in those from i - `left` to i + `right`.

    A row has so many `tokens`, each of `width` elements as it is taken in, with so many zeros `before` and `after` them; what
    comes out has so many elements `behind` its tokens, which nobody uses. `needed`: the gradient of what it takes in is. In its
    visit `attended` calls of attention stand before it, and the layers that `called` names. Where left and right are 0 it treats
    each token by itself, or has none.
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
        """How many other tokens it takes in for one."""
        return self.left_halo + self.right_halo


@dataclass(frozen=True)
class BlockSequenceInfo:
    """How tokens go through a visit: for each tensor among what it takes in and gives out, in order, which dims are tokens.

    `slots` are where those that it takes in stand among its arguments: others may be there on another batch. `mixes` says what
    keeps it from running on some of the tokens; empty: nothing, but for attention. `whole`: every rank runs it on all of them,
    since it is given nothing but what ranks read, and goes on with its own. `takes_of` and `gives_of` say of how many tokens in
    a sample they are, 0 where a tensor has none; empty: `Tokens.length`. `within` are modules that are called with tokens of
    other rows than the visit gives out (keys of an encoder): by name, how many those are.
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

    def with_lengths(self, length: int) -> "BlockSequenceInfo":
        """The same with all said, in a model whose `Tokens.length` is this."""
        takes, gives = (
            self.input_num_tokens or (length,) * len(self.input_token_dims),
            self.output_num_tokens or (length,) * len(self.output_token_dims),
        )
        return replace(self, input_num_tokens=takes, output_num_tokens=gives)

    def num_sharded_tokens(self, length: int) -> int:
        """Of how many tokens in a sample each rank runs some; 0: every rank runs it on all there is."""
        told = self.with_lengths(length)
        found = [
            *zip(told.output_token_dims, told.output_num_tokens, strict=True),
            *zip(told.input_token_dims, told.input_num_tokens, strict=True),
        ]
        return 0 if self.is_replicated else next((count for dims, count in found if dims), 0)


@dataclass(frozen=True)
class GlueGather:
    """What glue brings together of tokens: behind which visit (empty: in the loss), and how many elements per sample.

    Of so many `tokens` each rank gives its own, and gets all; 0: each gives a summand, and gets the sum. `rows`: every sample has
    as many; otherwise that is all of it, whatever the number of samples. `back` are the visits in whose backwards its gradient
    goes back (empty: in that of the loss). `dtype` is its own, where that is not the job's. `into` is the visit that is given it;
    empty: glue is.
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
    """What a model does with tokens: so many in a sample, which `inputs` and `targets` have them (along dim 1, behind the rows).

    `met` tells what glue needs of all tokens, in order; `varies` why that is not the same for every batch (empty: it is), and
    `looks` that glue, or the loss, looks at values of a batch, so that another one may take another way. `unseen`: glue gets hold
    of memory, and nobody is told what it writes there. Tokens may begin within, where a block takes in what was made of an image.
    A sample may have rows of unlike lengths: `others` are the inputs and targets that have another number of tokens than that,
    and how many.
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
    has_untracked_writes: bool = False

    def num_tokens_in(self, name: str) -> int:
        """How many tokens an input or target has."""
        return dict(self.other_lengths).get(name, self.length)

    def num_sharded_tokens(self, block_call: str, module: str = "") -> int:
        """Of how many tokens in a sample each rank runs some in a visit, or in a `module` of it; 0: every rank runs it on all."""
        return self._within.get((block_call, module), self._runs.get(block_call, self.length))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens the rows of a sample have, `length` first."""
        found = [self.length, *(count for _, count in self.other_lengths), *self._runs.values()]
        found += [count for attend in self.attention_calls for count in (attend.query_len, attend.key_len)]
        return tuple(dict.fromkeys(filter(None, found)))

    @cached_property
    def _within(self) -> dict[tuple[str, str], int]:
        return {
            (passing.block_call, name): count
            for passing in self.block_calls
            for name, count in passing.module_num_tokens
        }

    @cached_property
    def _runs(self) -> dict[str, int]:
        return {passing.block_call: passing.num_sharded_tokens(self.length) for passing in self.block_calls}
