"""Whether blocks compute alike on as many tokens as one device has, and on as few as a rank has.

A block may ask how many tokens there are, and go another way by that:

    x = x if x.shape[1] <= 16 else self.far(x)         one device, 40 tokens: far(x)          a rank, 14 of them: x

The trial that finds how tokens go through a model (model/passing.py) has rows of lengths that tell dims of tokens from others.
What a run has is found here, by forwards on fake tensors: one as on one device, one as on the rank that has fewest tokens, and
what each block computes is compared, operation by operation, with the numbers in it. Once for the plan, and again for rows that
are longer than all before, or of which a rank has fewer: what is alike at both ends is taken to be so between them.

Limits: a branch that turns and turns back between two lengths is not seen. Of rows so long that masks of all queries would not
fit here, and of tokens that begin within a model, nothing is found out.
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

from meshwright.model.sequence_analysis.analysis import Example, TrialFactory, resize_sequence
from meshwright.model.sequence_analysis.lengths import ComputedOp, length_dependence
from meshwright.model.sequence_analysis.token_dims import MAX_TRIAL_LENGTH
from meshwright.model.sequence_parallel.attention_call import AttentionMode, ShardedAttentionCall
from meshwright.model.sequence_parallel.conv_call import Conv1dMode, ShardedConv1dCall
from meshwright.model.sequence_parallel.hf_attention import patch_attention
from meshwright.model.sequence_parallel.sharded_forward import SequenceLengths, ShardedForward
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.function_modes import InterceptMode, function_title
from meshwright.model.trial.slice_trial import silence_fake_errors
from meshwright.model.trial.trial import PROBE_BATCH
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name
from meshwright.plan.model_spec.sequence_info import SequenceInfo, SequenceSharding

OpsByBlockCall = Mapping[str, list[ComputedOp]]  # what each visit computes, in order


@dataclass
class SequenceShardCheck:
    """The blocks of a model, tried on rows like those of `inputs` of the lengths that somebody has; threads may share it.

    `ready` gives a trial of the model.
    """

    inputs: Example
    make_trial: TrialFactory
    _fewest_tokens: dict[int, int] = field(
        default_factory=dict
    )  # by length in the plan: the fewest tokens on which they were alike
    _most_tokens: dict[int, int] = field(default_factory=dict)
    _ops: OpsByBlockCall = field(default_factory=dict)  # that on fewest
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def check(
        self, sequence_info: SequenceInfo, sequence_sharding: SequenceSharding, lengths: Mapping[int, int]
    ) -> None:
        """Raise PlanError where ranks to which `deal` gives tokens compute something else than one device.

        `lengths` says how many tokens rows have, by how many they have in the plan, where some are known.
        """
        lengths = {
            sequence_info.num_tokens_in(key): sequence_info.num_tokens_in(key) for key in sequence_info.inputs
        } | dict(lengths)
        if not lengths or any(passing.not_sequence_parallel for passing in sequence_info.block_calls):
            return
        if max(lengths.values()) > MAX_TRIAL_LENGTH and any(
            each.has_mask for each in sequence_info.attention_calls
        ):
            return
        ranks = range(sequence_sharding.num_ranks)
        few = min(
            ranks,
            key=lambda index: sum(
                sequence_sharding.num_padded_tokens(length, index) for length in lengths.values()
            ),
        )
        least = {
            planned: sequence_sharding.num_padded_tokens(length, few) for planned, length in lengths.items()
        }
        with self._lock:
            fewer = any(
                count < self._fewest_tokens.get(planned, count + 1) for planned, count in least.items()
            )
            course = (
                self._trace_in_thread(sequence_info, lengths, partial(_rank_shard, sequence_sharding, few))
                if fewer
                else self._ops
            )
            _compare_ops(self._ops, course, lengths)
            if any(length > self._most_tokens.get(planned, 0) for planned, length in lengths.items()):
                _compare_ops(course, self._trace_in_thread(sequence_info, lengths, _full_shard), lengths)
                self._most_tokens |= lengths
            if fewer:
                self._ops = course
                self._fewest_tokens |= least

    def _trace_in_thread(
        self, tokens: SequenceInfo, lengths: Mapping[int, int], share: Callable[[int], TokenShard]
    ) -> OpsByBlockCall:
        """What blocks compute on rows of so many tokens, of which a rank has a share; on a thread where nothing is active."""
        with ThreadPoolExecutor(1) as apart:
            return apart.submit(self._trace, tokens, lengths, share).result()

    def _trace(
        self, tokens: SequenceInfo, lengths: Mapping[int, int], share: Callable[[int], TokenShard]
    ) -> OpsByBlockCall:
        rows = {key: resize_sequence(value, lengths) for key, value in self.inputs.items()}
        try:
            with silence_fake_errors(), self.make_trial(rows, PROBE_BATCH) as run:
                forward = _OpRecorder(
                    tokens,
                    SequenceLengths.from_inputs(share, tokens, run.batch),
                    run.on_block_call,
                    run.fake_mode,
                )
                with forward.record_ops(run.module, run.blocks):
                    run.module(**run.batch)
        except PlanError:
            raise
        except Exception as error:
            words = " and ".join(map(str, lengths.values()))
            text = f"it does not run on rows of {words} tokens: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise PlanError(
                text, fix="give it rows that it takes, or set mesh.cp = 1", location="model"
            ) from error
        return forward.ops


class _OpRecorder(ShardedForward):
    """A forward on fake tensors as on a rank, that notes what blocks compute."""

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
        """Meanwhile the blocks of `module` run as on the rank; what experts do is their own."""
        asks = lambda: self._num_sharded_tokens.get(self._block_call, 0) > 0  # noqa: E731  what a name would say twice
        plugged = patch_attention(
            module,
            lambda queries, keys: self.next_attention_shards(self._block_call) if asks() else None,
            self._pause,
        )
        for name, block in blocks.items():
            block.forward = partial(self._run_block, name, block.forward)
        for socket in find_layer_roles(module):
            if socket.kind == "experts":
                experts = module.get_submodule(socket.name)
                experts.forward = partial(self._run_experts, experts.forward)
        with ExitStack() as stack:
            stack.callback(plugged.restore)
            stack.enter_context(
                AttentionMode(_empty_attention, lambda: self.take_attention_shards(self._block_call), asks)
            )
            stack.enter_context(
                Conv1dMode(
                    _empty_convolution,
                    lambda: self.take_convolution(self._block_call) if asks() else None,
                    self._pause,
                )
            )
            stack.enter_context(InterceptMode(self._record_op))
            yield

    def _run_block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._block_call or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        count = self._calls[name] = self._calls.get(name, 0) + 1
        visit = block_call_name(name, count)
        args, kwargs = self.enter_block(visit, (args, kwargs))
        self._on_block_call(visit)
        self._block_call = visit
        try:
            with self._fake_mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._block_call = ""
        return self.leave_block(outputs)

    def _run_experts(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._pause():
            return forward(*args, **kwargs)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._num_open_experts += 1
        try:
            yield
        finally:
            self._num_open_experts -= 1


def _compare_ops(course: OpsByBlockCall, found: OpsByBlockCall, lengths: Mapping[int, int]) -> None:
    """Raise PlanError where what was `found` on rows of these lengths is not the course."""
    words = " and ".join(map(str, lengths.values()))
    for visit, mine in course.items():
        why = length_dependence(mine, found.get(visit, []), words)
        if why:
            fix = f"let it compute the same on {words} tokens as on fewer; or set mesh.cp = 1, and as many ranks for dp_shard"
            raise PlanError(f"a block cannot run on some of the tokens: {why}", fix=fix, location="model")


def _empty_attention(asked: ShardedAttentionCall) -> torch.Tensor:
    return asked.query.new_empty((*asked.query.shape[:-1], asked.value.shape[-1]))


def _empty_convolution(convolved: ShardedConv1dCall) -> torch.Tensor:
    own, weight = convolved.local_input, convolved.arguments.weight
    return own.new_empty((*own.shape[:-2], weight.shape[0], own.shape[-1]))


def _full_shard(length: int) -> TokenShard:
    return TokenShard(length, ((0, length),))


def _rank_shard(deal: SequenceSharding, index: int, length: int) -> TokenShard:
    return TokenShard(length, deal.token_ranges(length, index), partial(_tile_to_length, length))


def _tile_to_length(length: int, local: torch.Tensor, dim: int) -> torch.Tensor:
    """As many tokens as one device has."""
    return local.index_select(dim, torch.arange(length) % local.shape[dim])
