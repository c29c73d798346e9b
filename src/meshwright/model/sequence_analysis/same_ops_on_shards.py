"""Checks that blocks run the same operations on a sequence shard as on full sequences.

A block may read the length and branch on it:

    x = x if x.shape[1] <= 16 else self.far(x)     one device, 40 tokens: far(x)     a rank with 14: x

The sequence analysis uses lengths that mark token dims. This check uses the lengths of the run, with
forwards on fake tensors: one as on one device, one as on the rank with the fewest tokens; it compares the
operations of each block and their numbers. It runs once for the plan, and again for sequences longer than
all before, or with fewer tokens on a rank: what is equal at both ends counts as equal between them.

Limits: a branch that turns and turns back between two lengths is missed. Sequences too long for real masks,
and tokens that start inside the model, are not checked.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.context_parallel.attention_call import AttentionMode, ShardedAttentionCall
from meshwright.model.context_parallel.block_input_sharding import SequenceLengths, ShardedForward
from meshwright.model.context_parallel.conv_call import Conv1dMode, ShardedConv1dCall
from meshwright.model.context_parallel.patch_hf_attention import patch_attention
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.sequence_analysis.analyze_sequence import Example, TrialFactory, resize_sequence
from meshwright.model.sequence_analysis.token_dims import MAX_TRIAL_LENGTH
from meshwright.model.sequence_analysis.trial_lengths import ComputedOp, length_dependence
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.call_description import function_title
from meshwright.model.tensors.function_modes import InterceptMode
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH
from meshwright.model.trial.weight_slice_trial import silence_fake_errors
from meshwright.nn.mixture_of_experts import ExpertRows
from meshwright.nn.whole_samples import WholeSamples
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.model_spec.sequence_info import SequenceInfo
from meshwright.plan.sharding.sequence_sharding import SequenceSharding

OpsByBlockCall = Mapping[str, list[ComputedOp]]  # operations by block call, in order


@dataclass
class SequenceShardCheck:
    """Compares the operations of blocks on the lengths of a run; threads may share it.

    `inputs` are samples, and `make_trial` makes a trial of the model.
    """

    inputs: Example
    make_trial: TrialFactory
    # by planned length: the fewest tokens with equal operations
    _fewest_tokens: dict[int, int] = field(default_factory=dict)
    _most_tokens: dict[int, int] = field(default_factory=dict)
    _ops: OpsByBlockCall = field(default_factory=dict)  # operations on the fewest tokens
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def check(
        self, sequence_info: SequenceInfo, sequence_sharding: SequenceSharding, lengths: Mapping[int, int]
    ) -> None:
        """Raises PlanError if ranks under `sequence_sharding` run other operations than one device.

        `lengths` maps planned lengths to actual ones, as far as they are known.
        """
        lengths = {
            sequence_info.num_tokens_in(key): sequence_info.num_tokens_in(key) for key in sequence_info.inputs
        } | dict(lengths)
        if not lengths or any(block_info.not_sequence_parallel for block_info in sequence_info.block_calls):
            return
        if max(lengths.values()) > MAX_TRIAL_LENGTH and any(
            each.has_mask for each in sequence_info.attention_calls
        ):
            return
        ranks = range(sequence_sharding.num_ranks)
        smallest_rank = min(
            ranks,
            key=lambda index: sum(
                sequence_sharding.num_padded_tokens(length, index) for length in lengths.values()
            ),
        )
        fewest = {
            planned: sequence_sharding.num_padded_tokens(length, smallest_rank)
            for planned, length in lengths.items()
        }
        with self._lock:
            has_fewer = any(
                num_calls < self._fewest_tokens.get(planned, num_calls + 1)
                for planned, num_calls in fewest.items()
            )
            ops = (
                self._trace_in_thread(
                    sequence_info, lengths, partial(_rank_shard, sequence_sharding, smallest_rank)
                )
                if has_fewer
                else self._ops
            )
            _compare_ops(self._ops, ops, lengths)
            if any(length > self._most_tokens.get(planned, 0) for planned, length in lengths.items()):
                _compare_ops(ops, self._trace_in_thread(sequence_info, lengths, _full_shard), lengths)
                self._most_tokens |= lengths
            if has_fewer:
                self._ops = ops
                self._fewest_tokens |= fewest

    def _trace_in_thread(
        self, sequence_info: SequenceInfo, lengths: Mapping[int, int], get_shard: Callable[[int], TokenShard]
    ) -> OpsByBlockCall:
        """Returns the operations of blocks on these lengths; on a thread without active modes."""
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(self._trace, sequence_info, lengths, get_shard).result()

    def _trace(
        self, sequence_info: SequenceInfo, lengths: Mapping[int, int], get_shard: Callable[[int], TokenShard]
    ) -> OpsByBlockCall:
        batch = {key: resize_sequence(value, lengths) for key, value in self.inputs.items()}
        try:
            with silence_fake_errors(), self.make_trial(batch, PROBE_BATCH) as trial:
                forward = _OpRecorder(
                    sequence_info,
                    SequenceLengths.from_inputs(get_shard, sequence_info, trial.batch),
                    trial.on_block_call,
                    trial.fake_mode,
                )
                with forward.record_ops(trial.module, trial.blocks):
                    trial.module(**trial.batch)
        except PlanError:
            raise
        except Exception as error:
            lengths_text = " and ".join(map(str, lengths.values()))
            text = (
                f"it does not run on sequences of {lengths_text} tokens: {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}"
            )
            raise PlanError(
                text, fix="use sequences that the model accepts, or set mesh.cp = 1", location="model"
            ) from error
        return forward.ops


class _OpRecorder(ShardedForward):
    def __init__(
        self,
        sequence_info: SequenceInfo,
        lengths: SequenceLengths,
        enter: Callable[[str], None],
        mode: FakeTensorMode,
    ) -> None:
        super().__init__(sequence_info, lengths)
        self.ops: dict[str, list[ComputedOp]] = {}
        self._on_block_call, self._fake_mode = enter, mode
        self._calls: dict[str, int] = {}
        self._block_call, self._num_open_experts = "", 0

    def _record_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._block_call and not self._num_open_experts:
            name = function_title(func).removesuffix(" of").strip("_")
            self.ops.setdefault(self._block_call, []).append(
                ComputedOp.from_call(self._block_call, name, args, kwargs)
            )
        return func(*args, **kwargs)

    @contextmanager
    def record_ops(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """Patches the blocks of `module` to run as on the rank; operations of experts and `WholeSamples` are
        not recorded.
        """
        is_sharded = lambda: self._num_sharded_tokens.get(self._block_call, 0) > 0  # noqa: E731  what a name would say twice
        patched = patch_attention(
            module,
            lambda queries, keys: self.next_attention_shards(self._block_call) if is_sharded() else None,
            self._pause,
        )
        for name, block in blocks.items():
            block.forward = partial(self._run_block, name, block.forward)
        experts = {each.name for each in find_layer_roles(module) if each.kind == "experts"}
        for name, part in module.named_modules():
            if name in experts or isinstance(part, ExpertRows):
                part.forward = partial(self._run_experts, part.forward)
            elif isinstance(part, WholeSamples):
                part.forward = self._run_whole_samples
        with ExitStack() as stack:
            stack.callback(patched.restore)
            stack.enter_context(
                AttentionMode(
                    _empty_attention, lambda: self.take_attention_shards(self._block_call), is_sharded
                )
            )
            stack.enter_context(
                Conv1dMode(
                    _empty_convolution,
                    lambda: self.take_convolution(self._block_call) if is_sharded() else None,
                    self._pause,
                )
            )
            stack.enter_context(InterceptMode(self._record_op))
            yield

    def _run_block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._block_call or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        num_calls = self._calls[name] = self._calls.get(name, 0) + 1
        block_call = block_call_name(name, num_calls)
        args, kwargs = self.enter_block(block_call, (args, kwargs))
        self._on_block_call(block_call)
        self._block_call = block_call
        try:
            with self._fake_mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._block_call = ""
        return self.leave_block(outputs)

    def _run_experts(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._pause():
            return forward(*args, **kwargs)

    def _run_whole_samples(
        self, compute: Callable[..., Any], *values: torch.Tensor, per_token: bool = True
    ) -> Any:
        with self._pause():
            if not self._num_sharded_tokens.get(self._block_call, 0):
                return compute(*values)
            return self.compute_of_whole_samples(self._block_call, compute, values, per_token=per_token)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._num_open_experts += 1
        try:
            yield
        finally:
            self._num_open_experts -= 1


def _compare_ops(ops: OpsByBlockCall, found: OpsByBlockCall, lengths: Mapping[int, int]) -> None:
    """Raises PlanError if `found`, on these lengths, differs from `ops`."""
    lengths_text = " and ".join(map(str, lengths.values()))
    for block_call, ops_of_call in ops.items():
        reason = length_dependence(ops_of_call, found.get(block_call, []), lengths_text)
        if reason:
            fix = (
                f"let it compute the same on {lengths_text} tokens as on fewer; or set mesh.cp = 1, and as "
                f"many ranks for dp_shard"
            )
            raise PlanError(f"a block cannot run on some of the tokens: {reason}", fix=fix, location="model")


def _empty_attention(call: ShardedAttentionCall) -> torch.Tensor:
    return call.query.new_empty((*call.query.shape[:-1], call.value.shape[-1]))


def _empty_convolution(call: ShardedConv1dCall) -> torch.Tensor:
    local_input, weight = call.local_input, call.arguments.weight
    return local_input.new_empty((*local_input.shape[:-2], weight.shape[0], local_input.shape[-1]))


def _full_shard(length: int) -> TokenShard:
    return TokenShard(length, ((0, length),))


def _rank_shard(sequence_sharding: SequenceSharding, index: int, length: int) -> TokenShard:
    gather = partial(_tile_to_length, length)
    return TokenShard(length, sequence_sharding.token_ranges(length, index), gather, gather_exactly=gather)


def _tile_to_length(length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
    return local.index_select(dim, torch.arange(length) % local.shape[dim])
