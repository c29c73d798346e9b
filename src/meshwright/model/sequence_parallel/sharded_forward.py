"""What is done round the blocks of a forward in which a rank has some of the tokens; and such a forward on the only rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshwright.model.sequence_parallel.sharded_activation import (
    OutputShards,
    SequenceShardedTensor,
    make_sharded_tensor,
    shard_block_inputs,
    shard_block_outputs,
    to_local_tensors,
    wrap_block_outputs,
)
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.model.tensors.grad_alias import make_alias
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import BlockSequenceInfo, ConvSpec, SequenceInfo


class SequenceLengths:
    """How many tokens rows have in one forward, by how many they have in the plan; `of(length)` are those that are here.

    Those of inputs are `known` beforehand, and others when a block first takes them in. `told` are those of what the model has
    given out.
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
        """Those of `inputs`. Raises PlanError for rows of unlike lengths that have the same one in the plan."""
        known: dict[int, dict[str, int]] = {}
        for key in sequence_info.inputs:
            if key in inputs:
                known.setdefault(sequence_info.num_tokens_in(key), {})[key] = inputs[key].shape[1]
        for found in known.values():
            if len(set(found.values())) > 1:
                said = ", ".join(f"{key} {length}" for key, length in found.items())
                text = f"the rows hold {said} tokens, and in the example of the plan they were as long as each other"
                fix = "pad the rows to one length, or make the plan from an example whose rows have unlike lengths too"
                raise PlanError(text, fix=fix, location="batch")
        return cls(get_shard, {planned: next(iter(found.values())) for planned, found in known.items()})

    @property
    def known_lengths(self) -> Mapping[int, int]:
        """How many tokens rows have, by how many they have in the plan, as far as that is known."""
        return dict(self._known_lengths)

    def __call__(self, planned: int, found: int) -> TokenShard:
        """Which tokens are here of rows that have `planned` in the plan, and are `found` to have so many where nobody knew."""
        return self.get_shard(self._known_lengths.setdefault(planned, found))

    def known_shard(self, planned: int) -> TokenShard:
        """The same of rows that were taken in before."""
        return self.get_shard(self._known_lengths[planned])


class ShardedForward:
    """A forward of a model of which `tokens` are known: `lengths` tells which of its rows' tokens are here."""

    def __init__(self, sequence_info: SequenceInfo, lengths: SequenceLengths) -> None:
        self.lengths = lengths
        self.active_calls: list[BlockSequenceInfo] = []
        self._block_calls = {
            passing.block_call: passing.with_lengths(sequence_info.length)
            for passing in sequence_info.block_calls
        }
        self._num_sharded_tokens = {
            visit: sequence_info.num_sharded_tokens(visit) for visit in self._block_calls
        }
        self._attention_calls: dict[str, list[tuple[int, int]]] = {}
        for each in sequence_info.attention_calls:
            self._attention_calls.setdefault(each.block_call, []).append((each.query_len, each.key_len))
        self._conv_calls: dict[str, list[ConvSpec]] = {}
        for each in sequence_info.conv_calls:
            self._conv_calls.setdefault(each.block_call, []).append(each)
        self._num_attention_calls = self._num_conv_calls = (
            0  # calls of attention in the visit under way, and of convolutions
        )

    def wrap_local(self, tensor: torch.Tensor, sequence_dim: int, length: int) -> Any:
        """This rank's tokens of `length`, `tensor`, as glue shall see them."""
        return make_sharded_tensor(tensor, sequence_dim, self.lengths.get_shard(length))

    def enter_block(self, block_call: str, inputs: Any) -> Any:
        """What the visit, given this, runs on; its end must be told by `leave`. Raises PlanError for an unknown one."""
        if block_call not in self._block_calls:
            text = f"the forward reaches '{block_call}', of which nothing is known: which of its tensors have tokens"
            raise PlanError(text, fix="let the forward call the same blocks on every batch", location="model")
        self.active_calls.append(self._block_calls[block_call])
        self._num_attention_calls = self._num_conv_calls = 0
        return shard_block_inputs(inputs, self.active_calls[-1], self.lengths)

    def leave_block(self, outputs: Any) -> Any:
        """What the visit that was entered last has given out, as glue shall see it."""
        passing = self.active_calls.pop()
        outputs, gives = (
            shard_block_outputs(outputs, passing, self.lengths),
            zip(passing.output_token_dims, passing.output_num_tokens, strict=True),
        )
        return wrap_block_outputs(
            outputs,
            [(dims[0], self.lengths.known_shard(planned)) if dims else None for dims, planned in gives],
        )

    def local_outputs(self, outputs: Any) -> Any:
        """This rank's tokens of what the model gives out."""
        self.lengths.output_shards = [
            (each.sequence_dim, each.token_shard) if type(each) is SequenceShardedTensor else None
            for each in tree_tensors(outputs)
        ]
        return to_local_tensors(outputs)

    def next_attention_shards(self, block_call: str) -> tuple[TokenShard, TokenShard]:
        """Which queries and keys are here of the call of attention that comes next in a visit."""
        calls = self._attention_calls.get(block_call, [])
        if len(set(calls)) > 1 and self._num_attention_calls >= len(calls):
            text = f"it calls attention {self._num_attention_calls + 1} times, and in the trial run {len(calls)} times"
            raise PlanError(text, fix="let a block attend as often on every batch", location=block_call)
        pair = (
            calls[min(self._num_attention_calls, len(calls) - 1)]
            if calls
            else (self._num_sharded_tokens[block_call],) * 2
        )
        queries, keys = map(self.lengths.known_shard, pair)
        return queries, keys

    def take_attention_shards(self, block_call: str) -> tuple[TokenShard, TokenShard]:
        """The same of the one that comes now."""
        found = self.next_attention_shards(block_call)
        self._num_attention_calls += 1
        return found

    def take_convolution(self, block_call: str) -> tuple[str, Sequence[ConvSpec], int, SequenceLengths]:
        """The visit, its convolutions, the number of the one that comes now, and which tokens are here."""
        self._num_conv_calls += 1
        return block_call, self._conv_calls.get(block_call, ()), self._num_conv_calls - 1, self.lengths


class SingleRankForward(ShardedForward):
    """Rows all of whose tokens are here: glue sees tensors that look whole, and a block what is here."""

    @classmethod
    def for_inputs(
        cls, sequence_info: SequenceInfo | None, inputs: Mapping[str, torch.Tensor]
    ) -> "SingleRankForward | None":
        """That on rows like those of `inputs`; None where nothing is known of tokens, or a visit needs all of them."""
        if sequence_info is None or any(
            passing.not_sequence_parallel for passing in sequence_info.block_calls
        ):
            return None
        return cls(sequence_info, SequenceLengths.from_inputs(_full_shard, sequence_info, inputs))


def _full_shard(length: int) -> TokenShard:
    return TokenShard(length, ((0, length),), lambda local, dim: make_alias(local))
