"""What a rank does that has some of the tokens of each sample: blocks run on those, and glue believes that all are here.

    batch     [ids of all tokens] --> this rank's --> embed --> Apart --> glue --> layer --> Apart --> ... --> loss of its labels
    layer     [ Apart, table of all positions, mask ] --> [ hidden, rows of the table, rows of the mask ] --> hidden' --> Apart

Every rank reads the same rows. A loss that is a sum over tokens is taken on this rank's; of any other, the first rank along the
axis takes the one of all tokens, which are brought together for it; and so of logits that glue has made of all. Attention asks
the technique that has dealt the tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.comm.collectives.redistribute import redistribute
from meshwright.engine.runtime.loss import Batch
from meshwright.engine.runtime.state import RankState
from meshwright.model.sequence_parallel.attention_call import (
    AttentionImpl,
    AttentionMode,
    ShardedAttentionCall,
)
from meshwright.model.sequence_parallel.conv_call import Conv1dImpl, Conv1dMode
from meshwright.model.sequence_parallel.hf_attention import patch_attention
from meshwright.model.sequence_parallel.sharded_activation import OutputShards, wrap_block_outputs
from meshwright.model.sequence_parallel.sharded_forward import SequenceLengths, ShardedForward
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.model.tensors.pytree import replace_tensors, tree_tensors
from meshwright.model.tensors.token_slices import span_positions
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.model_spec.sequence_info import MIN_TOKENS, SequenceInfo, SequenceSharding
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.placement import P, R, S


def make_sequence_runner(plan: Plan, state: RankState) -> "FullSequenceRunner":
    """How this rank runs the model on the tokens that it has."""
    deal, tokens = plan.sharding.sequence_sharding, plan.model_spec.sequence_info
    return (
        FullSequenceRunner(state)
        if deal is None or tokens is None
        else ShardedSequenceRunner(plan, state, deal, tokens)
    )


class FullSequenceRunner:
    """A rank that has all tokens of its samples: the model runs as it is."""

    is_first_rank = True  # of the ranks that have the tokens of the same samples

    def __init__(self, state: RankState) -> None:
        self._state = state

    def set_attention(self, attention_fn: AttentionImpl) -> None:
        """Have attention within blocks be what `answer` says."""
        raise RuntimeError("a strategy answers for attention, and none has dealt the tokens")

    def set_convolution(self, convolution_fn: Conv1dImpl) -> None:
        """Have convolutions over tokens within blocks be what `answer` says."""
        raise RuntimeError("a strategy answers for convolutions, and none has dealt the tokens")

    def forward_context(self, batch: Batch) -> AbstractContextManager[object]:
        """Round a forward on `batch`."""
        return nullcontext()

    def recompute_context(self, batch: Batch, block_call: str) -> AbstractContextManager[object]:
        """Round a `visit` of a forward on `batch` that is run again, as it was given then; another forward may be under way."""
        return nullcontext()

    def sharded_forward(self) -> ShardedForward | None:
        """What is done round the blocks of a part of the model (model/parts.py); None: nothing."""
        return None

    def run_model(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        """What `module` gives out on this rank's tokens of `inputs`."""
        return module(**inputs)

    def loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """The part of the loss of `batch` that this rank takes, of what `call` has given: those of all ranks add up to it."""
        return self._state.loss.total(outputs, batch)

    def remove_hooks(self) -> None:
        """Leave the model as it was."""


class ShardedSequenceRunner(ShardedForward, FullSequenceRunner):
    """One rank's part of the tokens of what it runs."""

    def __init__(
        self, plan: Plan, state: RankState, sequence_sharding: SequenceSharding, sequence_info: SequenceInfo
    ) -> None:
        ShardedForward.__init__(self, sequence_info, SequenceLengths(self._share, {}))
        FullSequenceRunner.__init__(self, state)
        self._deal, self._tokens = sequence_sharding, sequence_info
        self._group = state.world.group(plan.sharding.token_axes)
        self.is_first_rank = self._group.index == 0
        precision = (
            plan.job.precision
        )  # under autocast, what glue brings together travels as products take it
        self._wire = None if precision.compute == precision.parameters else getattr(torch, precision.compute)
        self._shares: dict[int, TokenShard] = {}  # by length
        self._forms: dict[tuple[Any, ...], SequenceLengths] = {}  # by shapes
        self._answer: AttentionImpl | None = None
        self._beside: Conv1dImpl | None = None
        self._active, self._depth, self._again, self._answering = False, 0, "", False
        self._calls: dict[str, int] = {}
        self._plugged = patch_attention(
            state.trained_module.module,
            lambda queries, keys: self.next_attention_shards(self._visit) if self._asks() else None,
        )
        self._handles = [
            handle
            for name, block in (
                state.trained_module.blocks.items() if not plan.sharding.block_calls_by_pp_rank else ()
            )  # parts say themselves what they run
            for handle in (
                block.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True),
                block.register_forward_hook(self._leave, with_kwargs=True, prepend=True),
            )
        ]

    def set_attention(self, attention_fn: AttentionImpl) -> None:
        self._answer = attention_fn

    def set_convolution(self, convolution_fn: Conv1dImpl) -> None:
        self._beside = convolution_fn

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._plugged.restore()

    @contextmanager
    def forward_context(self, batch: Batch) -> Iterator[None]:
        self.lengths, self._calls, self._depth, self._active = self._lengths_of(batch), {}, 0, True
        self.active_calls.clear()
        try:
            with self._attending():
                yield
        finally:
            self._active = False

    @contextmanager
    def recompute_context(self, batch: Batch, block_call: str) -> Iterator[None]:
        before = self.lengths, self._again, self._num_attention_calls, self._num_conv_calls
        self.lengths, self._again, self._num_attention_calls, self._num_conv_calls = (
            self._lengths_of(batch),
            block_call,
            0,
            0,
        )
        try:
            with self._attending():
                yield
        finally:
            self.lengths, self._again, self._num_attention_calls, self._num_conv_calls = before

    def sharded_forward(self) -> ShardedForward | None:
        return self

    def run_model(self, module: nn.Module, inputs: Mapping[str, torch.Tensor]) -> Any:
        return self.local_outputs(module(**inputs))

    def loss_sum(self, outputs: Any, batch: Batch) -> torch.Tensor:
        loss, told = self._state.loss, self._lengths_of(batch).output_shards
        share = self._read(outputs, told) if loss.is_token_sum else None
        targets = [key for key in self._tokens.targets if key in batch]
        if share is not None and all(batch[key].shape[1] == share.length for key in targets):
            mine = {
                key: share.take_local(value, 1) if key in targets else value for key, value in batch.items()
            }
            return loss.total(_own(outputs, told), mine)
        return loss.total(wrap_block_outputs(outputs, told), batch) * float(self.is_first_rank)

    def _read(self, outputs: Any, told: OutputShards) -> TokenShard | None:
        """Which tokens the loss reads; None where it reads more than those of one row that are here.

        Logits of a row as a whole, or of all tokens, are alike on all ranks.
        """
        split, known = (
            self._state.loss.vocab_parallel,
            dict(zip(map(id, tree_tensors(outputs)), told, strict=True)),
        )
        read = [
            known.get(id(each))
            for each in tree_tensors(split.logits(outputs) if split is not None else outputs)
        ]
        shares = {None if each is None else each[1].length: each for each in read}
        (found,) = shares.values() if len(shares) == 1 else (None,)
        return None if found is None else found[1]

    @contextmanager
    def _attending(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._answer is not None:
                stack.enter_context(
                    AttentionMode(self._answered, lambda: self.take_attention_shards(self._visit), self._asks)
                )
            if self._beside is not None and self._conv_calls:
                stack.enter_context(
                    Conv1dMode(
                        self._beside,
                        lambda: self.take_convolution(self._visit) if self._asks() else None,
                        self._aside,
                    )
                )
            yield

    @property
    def _visit(self) -> str:
        """The visit that runs; empty: glue."""
        return self._again or (self.active_calls[-1].block_call if self.active_calls else "")

    def _asks(self) -> bool:
        return self._num_sharded_tokens.get(self._visit, 0) > 0 and not self._answering

    def _answered(self, asked: ShardedAttentionCall) -> torch.Tensor:
        """What the technique says; attention that it calls for itself is torch's, though another forward may be under way."""
        if self._answer is None:
            raise RuntimeError("attention is asked of a technique, and none answers")
        with self._aside():
            return self._answer(asked)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._answering = True
        try:
            yield
        finally:
            self._answering = False

    def _lengths_of(self, batch: Batch) -> SequenceLengths:
        form = tuple((key, value.shape) for key, value in batch.items())
        if form not in self._forms:
            lengths = SequenceLengths.from_inputs(self._share, self._tokens, batch)
            if self._state.trained_module.sequence_check is not None:
                self._state.trained_module.sequence_check.check(
                    self._tokens, self._deal, lengths.known_lengths
                )
            self._forms[form] = lengths
        return self._forms[form]

    def _share(self, length: int) -> TokenShard:
        if length not in self._shares:
            spans = self._deal.token_ranges(length, self._group.index)
            together = (
                self._deal.inner_group_ranges(length, self._group.index)
                if self._deal.num_inner_ranks > 1
                else ()
            )
            keeps = not self._tokens.has_untracked_writes
            self._shares[length] = TokenShard(
                length, spans, partial(self._bring, length), self._add, together, keeps
            )
        return self._shares[length]

    def _bring(self, length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
        """All tokens along `dim`, in order of their positions; backward gives each rank the sum of what all make of its own."""
        counts = self._deal.num_tokens_by_rank(length)
        most = max(counts)
        local = local.narrow(dim, 0, counts[self._group.index])
        pad = [0, 0] * (local.ndim - 1 - dim) + [0, most - local.shape[dim]]
        padded = F.pad(local, pad) if pad[-1] else local
        wire = local.dtype if self._wire is None or not local.is_floating_point() else self._wire
        met = redistribute(padded.to(wire), self._group, S(dim), R, lambda: self._state.current_action).to(
            local.dtype
        )
        places = torch.empty(length, dtype=torch.int64)
        for index in range(self._group.size):
            at = torch.tensor(span_positions(self._deal.token_ranges(length, index)))
            places[at] = torch.arange(len(at)) + index * most
        return met.index_select(dim, places.to(met.device))

    def _add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks give; backward gives each that of its gradients. It travels in float32 at least."""
        wide = torch.promote_types(part.dtype, torch.float32)
        return redistribute(part.to(wide), self._group, P, R, lambda: self._state.current_action).to(part.dtype)

    def _enter(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._active:
            return None
        self._depth += 1
        if self._depth > 1:  # within another block
            return None
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = block_call_name(name, count)
        return self.enter_block(visit, (args, kwargs))

    def _leave(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        if not self._active:
            return None
        self._depth -= 1
        return self.leave_block(outputs) if not self._depth else None


def _own(outputs: Any, told: OutputShards) -> Any:
    """`outputs` without what stands in for tokens."""
    pairs = zip(tree_tensors(outputs), told, strict=True)
    few = {
        id(each): each.narrow(known[0], 0, known[1].num_tokens)
        for each, known in pairs
        if known and known[1].num_tokens < MIN_TOKENS
    }
    return replace_tensors(outputs, few) if few else outputs
