"""Runs the model on this rank's tokens of each sample.

Blocks run on those, and glue sees sequence-sharded tensors.

    batch     [ids of all tokens] --> this rank's --> embed --> sharded --> glue --> layer --> ... --> loss
    layer     [ sharded, table of positions, mask ] --> [ hidden, rows of its tokens ] --> hidden'

Every rank reads the same samples. A loss that is a sum over tokens is computed on this rank's tokens. For any
other loss, and for logits that glue has computed from all tokens, all tokens are gathered, and the first rank
along the axis computes it. The technique that shards the sequence computes attention.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.comm.collectives.redistribute import redistribute
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.context_parallel.attention_call import (
    AttentionImpl,
    AttentionMode,
    DecodeAttentionImpl,
    ShardedAttentionCall,
)
from meshwright.model.context_parallel.block_input_sharding import SequenceLengths, ShardedForward
from meshwright.model.context_parallel.conv_call import Conv1dImpl, Conv1dMode
from meshwright.model.context_parallel.patch_hf_attention import PatchedAttention, patch_attention
from meshwright.model.context_parallel.sharded_activation import OutputShards, wrap_block_outputs
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.loss.loss_definition import Batch
from meshwright.model.tensors.function_modes import CallFunction, call_unchanged
from meshwright.model.tensors.pytree import copy_containers, replace_tensors, tree_tensors
from meshwright.model.tensors.select_token_ranges import index_tensor, span_positions
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS, SequenceSharding
from meshwright.plan.sharding.tensor_placements import P, R, S


def make_sequence_runner(state: RankState) -> "FullSequenceRunner":
    """Returns how this rank runs the model: on full sequences, or on its shards of them."""
    plan = state.plan
    sequence_sharding, sequence_info = plan.sharding.sequence_sharding, plan.model_spec.sequence_info
    return (
        FullSequenceRunner(state)
        if sequence_sharding is None or sequence_info is None
        else ShardedSequenceRunner(state, sequence_sharding, sequence_info)
    )


class FullSequenceRunner:
    """A rank that has all tokens of its samples: the model runs as it is."""

    is_first_rank = True  # of the ranks that share the same samples
    # attention of new tokens that all ranks have to keys that are divided over them; None: keys are not
    decode_attention: DecodeAttentionImpl | None = None

    def __init__(self, state: RankState) -> None:
        self._state = state

    def set_attention(self, attention_fn: AttentionImpl) -> None:
        """Makes `attention_fn` compute attention within blocks."""
        raise RuntimeError("a strategy computes attention, and no strategy shards the sequence")

    def set_convolution(self, convolution_fn: Conv1dImpl) -> None:
        """Makes `convolution_fn` compute convolutions over tokens within blocks."""
        raise RuntimeError("a strategy computes convolutions, and no strategy shards the sequence")

    def set_decode_attention(self, attention_fn: DecodeAttentionImpl) -> None:
        """Makes `attention_fn` compute attention while tokens are generated with divided keys and values."""
        raise RuntimeError("a strategy divides keys and values, and no strategy shards the sequence")

    def set_exchange_call(self, call: CallFunction) -> None:
        """Makes `call(func, args, kwargs)` run what exchanges tokens within blocks: a compiler's, between two
        graphs.
        """

    def forward_context(self, batch: Batch) -> AbstractContextManager[object]:
        """Returns a context for a forward on `batch`."""
        return nullcontext()

    def recompute_context(self, batch: Batch, block_call: str) -> AbstractContextManager[object]:
        """Returns a context for a block call of a forward on `batch` that is run again.

        Another forward may be under way.
        """
        return nullcontext()

    def sharded_forward(self) -> ShardedForward | None:
        """Returns what stages run around their blocks (model/context_parallel/block_input_sharding.py).

        None: nothing.
        """
        return None

    def run_model(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        """Returns the outputs of `module` on this rank's tokens of `inputs`."""
        return module(**inputs)

    def loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Returns this rank's part of the loss of `batch`, from the outputs of `run_model`.

        All ranks' parts add up to it.
        """
        return self._state.loss.total(outputs, batch)

    def full_outputs(self, outputs: Any, batch: Batch) -> Any:
        """Returns the outputs of `run_model` as the loss sees those of all tokens."""
        return outputs

    def local_tokens(self, column: torch.Tensor) -> torch.Tensor:
        """Returns what `column`, (samples, tokens, ...), has of the tokens that blocks of this rank see."""
        return column

    def full_sequences(self) -> AbstractContextManager[object]:
        """Returns a context in which forwards run as on one device, on all tokens on every rank."""
        return nullcontext()

    def shard_blocks_of(self, driver: ForwardDriver) -> None:
        """Makes the blocks of `driver` run on this rank's tokens within `forward_context`."""

    def restore_model(self) -> None:
        """Restores the model."""


class ShardedSequenceRunner(ShardedForward, FullSequenceRunner):
    """A rank that has a shard of each sequence."""

    def __init__(
        self, state: RankState, sequence_sharding: SequenceSharding, sequence_info: SequenceInfo
    ) -> None:
        ShardedForward.__init__(self, sequence_info, SequenceLengths(self._token_shard, {}))
        FullSequenceRunner.__init__(self, state)
        self._sequence_sharding, self._sequence_info = sequence_sharding, sequence_info
        self._group = state.world.group(state.plan.sharding.token_axes)
        self.is_first_rank = self._group.index == 0
        # under autocast, what glue brings together travels as products take it
        precision = state.plan.job.precision
        self._comm_dtype = (
            None if precision.compute == precision.parameters else getattr(torch, precision.compute)
        )
        self._is_float64 = precision.compute == "float64"
        self._token_shards: dict[int, TokenShard] = {}  # by length
        self._gather_orders: dict[int, torch.Tensor] = {}  # by length, on the device
        self._lengths_by_shapes: dict[tuple[Any, ...], SequenceLengths] = {}  # by shapes
        self._attention_fn: AttentionImpl | None = None
        self._convolution_fn: Conv1dImpl | None = None
        self._exchange_call: CallFunction = call_unchanged
        self._recomputed_call, self._in_own_kernel = "", False
        self._num_calls: dict[str, int] = {}
        self._attention_patch = self._patch_attention()
        own_calls = state.plan.view.model_spec.block_calls
        for name in {each.module for each in sequence_info.sample_gathers if each.block_call in own_calls}:
            state.patches.replace_forward(name, self._run_whole_samples)
        self._driver: ForwardDriver | None = None

    def set_attention(self, attention_fn: AttentionImpl) -> None:
        self._attention_fn = attention_fn

    def set_convolution(self, convolution_fn: Conv1dImpl) -> None:
        self._convolution_fn = convolution_fn

    def set_decode_attention(self, attention_fn: DecodeAttentionImpl) -> None:
        self.decode_attention = attention_fn

    def set_exchange_call(self, call: CallFunction) -> None:
        self._exchange_call = call

    def shard_blocks_of(self, driver: ForwardDriver) -> None:
        self._driver = driver

    def restore_model(self) -> None:
        self._attention_patch.restore()

    @contextmanager
    def forward_context(self, batch: Batch) -> Iterator[None]:
        self.lengths, self._num_calls = self._lengths_of(batch), {}
        self.active_calls.clear()
        with (
            nullcontext() if self._driver is None else self._driver.use_interceptor(self._run_block),
            self._override_layers(),
        ):
            yield

    @contextmanager
    def recompute_context(self, batch: Batch, block_call: str) -> Iterator[None]:
        before = self.lengths, self._recomputed_call, self._num_attention_calls, self._num_conv_calls
        self.lengths, self._recomputed_call, self._num_attention_calls, self._num_conv_calls = (
            self._lengths_of(batch),
            block_call,
            0,
            0,
        )
        try:
            with self._override_layers():
                yield
        finally:
            self.lengths, self._recomputed_call, self._num_attention_calls, self._num_conv_calls = before

    @contextmanager
    def full_sequences(self) -> Iterator[None]:
        # the attention of shards knows no cache, and expects biases and masks of shards
        self._attention_patch.restore()
        try:
            yield
        finally:
            self._attention_patch = self._patch_attention()

    def sharded_forward(self) -> ShardedForward | None:
        return self

    def run_model(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self.local_outputs(module(**inputs))

    def loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss, output_shards = self._state.loss, self._lengths_of(batch).output_shards
        token_shard = self._loss_shard(outputs, output_shards) if loss.is_token_sum else None
        targets = [key for key in self._sequence_info.targets if key in batch]
        if token_shard is not None and all(batch[key].shape[1] == token_shard.length for key in targets):
            local_batch = {
                key: token_shard.take_local(value, 1) if key in targets else value
                for key, value in batch.items()
            }
            return loss.total(_drop_padding(outputs, output_shards), local_batch)
        return loss.total(self.full_outputs(outputs, batch), batch) * float(self.is_first_rank)

    def full_outputs(self, outputs: Any, batch: Batch) -> Any:
        return wrap_block_outputs(copy_containers(outputs), self._lengths_of(batch).output_shards)

    def local_tokens(self, column: torch.Tensor) -> torch.Tensor:
        return self._token_shard(column.shape[1]).take_padded(column, 1)

    def _loss_shard(self, outputs: Any, output_shards: OutputShards) -> TokenShard | None:
        """Returns the shard of tokens that the loss reads; None where it reads more than this rank's tokens.

        Logits of a whole sample, or of all tokens, are equal on all ranks.
        """
        split, shards_by_output = (
            self._state.loss.vocab_parallel,
            dict(zip(map(id, tree_tensors(outputs)), output_shards, strict=True)),
        )
        read = [
            shards_by_output.get(id(each))
            for each in tree_tensors(split.logits(outputs) if split is not None else outputs)
        ]
        shards_by_length = {None if each is None else each[1].length: each for each in read}
        (shard,) = shards_by_length.values() if len(shards_by_length) == 1 else (None,)
        return None if shard is None else shard[1]

    def _patch_attention(self) -> PatchedAttention:
        return patch_attention(
            self._state.trained_module.module,
            lambda queries, keys: (
                self.next_attention_shards(self._current_call) if self._is_sharded_call() else None
            ),
        )

    @contextmanager
    def _override_layers(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._attention_fn is not None:
                stack.enter_context(
                    AttentionMode(
                        self._run_attention,
                        lambda: self.take_attention_shards(self._current_call),
                        self._is_sharded_call,
                        self._exchange_call,
                    )
                )
            if self._convolution_fn is not None and self._conv_calls:
                stack.enter_context(
                    Conv1dMode(
                        self._convolution_fn,
                        lambda: (
                            self.take_convolution(self._current_call) if self._is_sharded_call() else None
                        ),
                        self._use_torch_kernels,
                        self._exchange_call,
                    )
                )
            yield

    @property
    def _current_call(self) -> str:
        """The block call that runs; "" in glue."""
        return self._recomputed_call or (self.active_calls[-1].block_call if self.active_calls else "")

    def _is_sharded_call(self) -> bool:
        return self._num_sharded_tokens.get(self._current_call, 0) > 0 and not self._in_own_kernel

    def _run_attention(self, attention_call: ShardedAttentionCall) -> torch.Tensor:
        if self._attention_fn is None:
            raise RuntimeError("attention needs a technique that shards the sequence, and there is none")
        with self._use_torch_kernels():
            return self._attention_fn(attention_call)

    @contextmanager
    def _use_torch_kernels(self) -> Iterator[None]:
        self._in_own_kernel = True
        try:
            yield
        finally:
            self._in_own_kernel = False

    def _lengths_of(self, batch: Batch) -> SequenceLengths:
        shapes = tuple((key, value.shape) for key, value in batch.items())
        if shapes not in self._lengths_by_shapes:
            lengths = SequenceLengths.from_inputs(self._token_shard, self._sequence_info, batch)
            if self._state.trained_module.sequence_check is not None:
                self._state.trained_module.sequence_check.check(
                    self._sequence_info, self._sequence_sharding, lengths.known_lengths
                )
            self._lengths_by_shapes[shapes] = lengths
        return self._lengths_by_shapes[shapes]

    def _token_shard(self, length: int) -> TokenShard:
        if length not in self._token_shards:
            spans = self._sequence_sharding.token_ranges(length, self._group.index)
            inner_ranges = (
                self._sequence_sharding.inner_group_ranges(length, self._group.index)
                if self._sequence_sharding.num_inner_ranks > 1
                else ()
            )
            keeps_positions = not self._sequence_info.has_untracked_writes
            self._token_shards[length] = TokenShard(
                length,
                spans,
                partial(self._all_gather_tokens, length),
                self._all_reduce_partial,
                inner_ranges,
                keeps_positions,
                gather_exactly=partial(self._all_gather_tokens, length, is_exact=True),
            )
        return self._token_shards[length]

    def _run_whole_samples(
        self, module: nn.Module, compute: Callable[..., Any], *values: torch.Tensor, per_token: bool = True
    ) -> Any:
        """Runs `nn.WholeSamples` on the values of all tokens."""
        if not self._is_sharded_call():
            return compute(*values)
        return self.compute_of_whole_samples(self._current_call, compute, values, per_token=per_token)

    def _all_gather_tokens(
        self, length: int, local: torch.Tensor, dim: int, *, is_exact: bool = False
    ) -> torch.Tensor:
        """Gathers all tokens along `dim`, in position order; if `is_exact`, in a dtype that rounds nothing.

        Backward sums each rank's gradients over all ranks.
        """
        num_tokens = self._sequence_sharding.num_tokens_by_rank(length)
        max_count = max(num_tokens)
        local = local.narrow(dim, 0, num_tokens[self._group.index])
        pad = [0, 0] * (local.ndim - 1 - dim) + [0, max_count - local.shape[dim]]
        padded = F.pad(local, pad) if pad[-1] else local
        comm_dtype = local.dtype
        if is_exact:
            wide = torch.float64 if self._is_float64 else torch.float32
            comm_dtype = wide if local.is_floating_point() else torch.int64
        elif self._comm_dtype is not None and local.is_floating_point():
            comm_dtype = self._comm_dtype
        gathered = redistribute(
            padded.to(comm_dtype), self._group, S(dim), R, lambda: self._state.current_action
        ).to(local.dtype)
        if length not in self._gather_orders:
            order = np.empty(length, np.int64)
            for index in range(self._group.size):
                positions_here = span_positions(self._sequence_sharding.token_ranges(length, index))
                order[positions_here] = np.arange(len(positions_here)) + index * max_count
            self._gather_orders[length] = index_tensor(order, gathered.device)
        return gathered.index_select(dim, self._gather_orders[length])

    def _all_reduce_partial(self, part: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in float32 at least; backward sums the gradients."""
        sum_dtype = torch.promote_types(part.dtype, torch.float32)
        return redistribute(part.to(sum_dtype), self._group, P, R, lambda: self._state.current_action).to(
            part.dtype
        )

    def _run_block(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a block on the tokens of this rank; hooks on the block see what glue gives and gets."""
        count = self._num_calls[name] = self._num_calls.get(name, 0) + 1
        args, kwargs = self.enter_block(block_call_name(name, count), (args, kwargs))
        return self.leave_block(run(*args, **kwargs))


def _drop_padding(outputs: Any, output_shards: OutputShards) -> Any:
    pairs = zip(tree_tensors(outputs), output_shards, strict=True)
    without_padding = {
        id(each): each.narrow(shards_by_output[0], 0, shards_by_output[1].num_tokens)
        for each, shards_by_output in pairs
        if shards_by_output and shards_by_output[1].num_tokens < MIN_TOKENS
    }
    return replace_tensors(outputs, without_padding) if without_padding else outputs
