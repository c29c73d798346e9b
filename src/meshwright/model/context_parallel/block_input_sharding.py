"""Shards inputs and wraps outputs of blocks in a forward on a sequence shard, also on a single rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.context_parallel.sharded_activation import (
    OutputShards,
    SequenceShardedTensor,
    make_sharded_tensor,
    shard_block_inputs,
    shard_block_outputs,
    to_local_tensors,
    wrap_block_outputs,
)
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.hf.captured_outputs import CaptureMark, capture_marks
from meshwright.model.tensors.inplace_leaf_alias import make_alias
from meshwright.model.tensors.pytree import replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, CapturedTokens, ConvSpec, SequenceInfo
from meshwright.plan.sharding.sequence_sharding import num_positions, with_padding


def expose_captured(
    side_channels: Sequence[CaptureMark],
    captured: Sequence[CapturedTokens | None],
    get_shard: Callable[[int], TokenShard],
) -> None:
    """Replaces what a block has put into its `side_channels` by what glue sees of it: with all tokens.

    `captured` describes these tensors, and `get_shard(length)` gives the shard of a planned length. Tokens
    that are merged with samples are gathered.
    """
    added = [mark.added_tensors for mark in side_channels]
    exposed = dict[int, torch.Tensor]()
    for tensor, tokens in zip(tree_tensors(added), captured, strict=True):
        if tokens is None:
            continue
        shard = get_shard(tokens.num_tokens)
        if tokens.is_merged:
            num_local = num_positions(with_padding(shard.spans))
            # other stages of a pipeline would return a gradient of zeros, for a collective
            source = tensor if tokens.needs_grad else tensor.detach()
            exposed[id(tensor)] = shard.gather(source.unflatten(0, (-1, num_local)), 1).flatten(0, 1)
        else:
            exposed[id(tensor)] = make_sharded_tensor(tensor, tokens.dim, shard)
    for mark, tensors in zip(side_channels, added, strict=True):
        mark.replace(replace_tensors(tensors, exposed))


class SequenceLengths:
    """The sequence lengths of one forward, by their length in the plan; `get_shard(length)` gives the shard
    of this rank.

    The lengths of inputs are known beforehand, others when a block first takes them. `output_shards` are
    those of the model outputs.
    """

    def __init__(self, get_shard: Callable[[int], TokenShard], known_lengths: Mapping[int, int]) -> None:
        self.get_shard, self._known_lengths = get_shard, dict(known_lengths)
        self.output_shards: OutputShards = ()

    @classmethod
    def from_inputs(
        cls,
        get_shard: Callable[[int], TokenShard],
        sequence_info: SequenceInfo,
        inputs: Mapping[str, torch.Tensor],
    ) -> "SequenceLengths":
        """Returns the lengths of `inputs`. Raises PlanError if inputs differ in length that have the same
        length in the plan.
        """
        known: dict[int, dict[str, int]] = {}
        for key in sequence_info.inputs:
            if key in inputs:
                known.setdefault(sequence_info.num_tokens_in(key), {})[key] = inputs[key].shape[1]
        for found in known.values():
            if len(set(found.values())) > 1:
                described = ", ".join(f"{key} {length}" for key, length in found.items())
                text = (
                    f"the sequences have {described} tokens, and in the example of the plan they were as "
                    f"long as each other"
                )
                fix = (
                    "pad the sequences to one length, or make the plan from an example whose sequences "
                    "differ in length too"
                )
                raise PlanError(text, fix=fix, location="batch")
        return cls(get_shard, {planned: next(iter(found.values())) for planned, found in known.items()})

    @property
    def known_lengths(self) -> Mapping[int, int]:
        """The known lengths, by their length in the plan."""
        return dict(self._known_lengths)

    def __call__(self, planned: int, found: int) -> TokenShard:
        """Returns the shard of sequences of length `planned` in the plan; `found` is their length if it was
        unknown.
        """
        return self.get_shard(self._known_lengths.setdefault(planned, found))

    def known_shard(self, planned: int) -> TokenShard:
        """Returns the shard of sequences that were seen before."""
        return self.get_shard(self._known_lengths[planned])


class ShardedForward:
    """One forward on a sequence shard: prepares the inputs and outputs of each block call."""

    def __init__(self, sequence_info: SequenceInfo, lengths: SequenceLengths) -> None:
        self.lengths = lengths
        self.active_calls: list[BlockSequenceInfo] = []
        self._block_calls = {
            block_call.block_call: block_call.with_lengths(sequence_info.length)
            for block_call in sequence_info.block_calls
        }
        self._num_sharded_tokens = {
            block_call: sequence_info.num_sharded_tokens(block_call) for block_call in self._block_calls
        }
        self._attention_calls: dict[str, list[tuple[int, int]]] = {}
        for each in sequence_info.attention_calls:
            self._attention_calls.setdefault(each.block_call, []).append((each.query_len, each.key_len))
        self._conv_calls: dict[str, list[ConvSpec]] = {}
        for each in sequence_info.conv_calls:
            self._conv_calls.setdefault(each.block_call, []).append(each)
        self._num_attention_calls = self._num_conv_calls = 0  # in the current block call
        self._side_channels: tuple[CaptureMark, ...] = ()  # of the current block call

    def wrap_local(self, tensor: torch.Tensor, sequence_dim: int, length: int) -> Any:
        """Returns the local tokens `tensor` of a sequence of `length`, as glue sees them."""
        return make_sharded_tensor(tensor, sequence_dim, self.lengths.get_shard(length))

    def enter_block(self, block_call: str, inputs: Any) -> Any:
        """Returns the inputs on which the block call runs; `leave_block` ends it. Raises PlanError for an
        unknown block call.
        """
        if block_call not in self._block_calls:
            text = f"the forward reaches '{block_call}', which the plan does not contain"
            raise PlanError(text, fix="let the forward call the same blocks on every batch", location="model")
        self.active_calls.append(self._block_calls[block_call])
        self._num_attention_calls = self._num_conv_calls = 0
        self._side_channels = capture_marks()
        return shard_block_inputs(inputs, self.active_calls[-1], self.lengths)

    def leave_block(self, outputs: Any) -> Any:
        """Returns the outputs of the last block call as glue sees them."""
        block_call = self.active_calls.pop()
        self._check_captured(block_call)
        expose_captured(self._side_channels, block_call.captured, self.lengths.known_shard)
        outputs, gives = (
            shard_block_outputs(outputs, block_call, self.lengths),
            zip(block_call.output_token_dims, block_call.output_num_tokens, strict=True),
        )
        return wrap_block_outputs(
            outputs,
            [(dims[0], self.lengths.known_shard(planned)) if dims else None for dims, planned in gives],
        )

    def _check_captured(self, block_call: BlockSequenceInfo) -> None:
        count = len(tree_tensors([mark.added_tensors for mark in self._side_channels]))
        if count != len(block_call.captured):
            text = (
                f"{count} tensors are captured in '{block_call.block_call}', and in the trial "
                f"{len(block_call.captured)} were"
            )
            raise PlanError(text, fix="capture the same tensors in every forward", location="model")

    def local_outputs(self, outputs: Any) -> Any:
        """Returns the local tokens of the model outputs."""
        self.lengths.output_shards = [
            (each.sequence_dim, each.token_shard) if type(each) is SequenceShardedTensor else None
            for each in tree_tensors(outputs)
        ]
        return to_local_tensors(outputs)

    def next_attention_shards(self, block_call: str) -> tuple[TokenShard, TokenShard]:
        """Returns the query and key shards of the next attention call in a block call."""
        attention_calls = self._attention_calls.get(block_call, [])
        if len(set(attention_calls)) > 1 and self._num_attention_calls >= len(attention_calls):
            text = (
                f"it calls attention {self._num_attention_calls + 1} times, and in the trial "
                f"{len(attention_calls)} times"
            )
            raise PlanError(
                text, fix="let a block call attention equally often on every batch", location=block_call
            )
        lengths = (
            attention_calls[min(self._num_attention_calls, len(attention_calls) - 1)]
            if attention_calls
            else (self._num_sharded_tokens[block_call],) * 2
        )
        queries, keys = map(self.lengths.known_shard, lengths)
        return queries, keys

    def take_attention_shards(self, block_call: str) -> tuple[TokenShard, TokenShard]:
        """Returns the same and moves on to the next attention call."""
        found = self.next_attention_shards(block_call)
        self._num_attention_calls += 1
        return found

    def take_convolution(self, block_call: str) -> tuple[str, Sequence[ConvSpec], int, SequenceLengths]:
        """Returns the block call, its convolutions, the index of the current one, and the lengths; moves on
        to the next.
        """
        self._num_conv_calls += 1
        return block_call, self._conv_calls.get(block_call, ()), self._num_conv_calls - 1, self.lengths

    def compute_of_whole_samples(
        self,
        block_call: str,
        compute: Callable[..., Any],
        values: Sequence[torch.Tensor],
        *,
        per_token: bool,
    ) -> Any:
        """Returns what `nn.WholeSamples` returns for the `values` of this rank's tokens in a block call.

        Raises PlanError for values of other tokens.
        """
        shard = self.lengths.known_shard(self._num_sharded_tokens[block_call])
        spans = with_padding(shard.spans)
        if any(each.shape[1] != num_positions(spans) for each in values):
            shapes = " and ".join(str(list(each.shape)) for each in values)
            text = (
                f"whole samples are computed of {shapes}, and a rank has {num_positions(spans)} tokens here"
            )
            fix = "give nn.WholeSamples values [samples, tokens, ..] of all tokens that the block gets"
            raise PlanError(text, fix=fix, location=block_call)
        results = compute(*(shard.gather_exactly(each, 1) for each in values))
        if not per_token:
            return results
        selected = {
            id(each): shard.selector.select_spans(each, 1, spans) for each in tree_tensors((results,))
        }
        return replace_tensors((results,), selected)[0]


class SingleRankForward(ShardedForward):
    """A forward whose only rank has all tokens: glue sees SequenceShardedTensors, blocks their local
    tensors.
    """

    @classmethod
    def for_inputs(
        cls, sequence_info: SequenceInfo | None, inputs: Mapping[str, torch.Tensor]
    ) -> "SingleRankForward | None":
        """Returns a forward for `inputs`; None without sequence info, or if a block call cannot run on a
        shard.
        """
        if sequence_info is None or any(
            block_call.not_sequence_parallel for block_call in sequence_info.block_calls
        ):
            return None
        return cls(sequence_info, SequenceLengths.from_inputs(_full_shard, sequence_info, inputs))


def _full_shard(length: int) -> TokenShard:
    return TokenShard(length, ((0, length),), lambda local, dim: make_alias(local))
