"""Traces what block calls do with tokens in one forward on all of them: inputs, outputs, and what mixes
tokens.

A block gets copies of the tensors of glue, so no other code holds them: a tensor of a block that reaches
glue other than as an output is detected. Of equal block calls the first is traced (equal_block_traces.py).

Limit: this cannot be read off the recorded forward, which has other lengths, so it needs live tensors. Glue
runs on tensors of which a rank has some tokens, and their class decides which operations gather; blocks run
with the attention that a rank has.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.inplace_writes_in_glue import UNTRACKED_ACCESS, GatheredTensors
from meshwright.model.context_parallel.attention_call import SDPAArguments
from meshwright.model.context_parallel.block_input_sharding import expose_captured
from meshwright.model.context_parallel.patch_hf_attention import patch_attention
from meshwright.model.context_parallel.sharded_activation import (
    SequenceShardedTensor,
    find_sharded_tensors,
    wrap_block_outputs,
)
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.hf.captured_outputs import CaptureMark, capture_marks
from meshwright.model.hf.declared_tp_plan import sdpa_advice
from meshwright.model.recording.op_table import reads_values
from meshwright.model.sequence_analysis.block_input_token_dims import (
    BlockInputs,
    TracedBlockCall,
    analyze_block_inputs,
    describe_attention_call,
    describe_shape,
    group_by_sample,
    is_unrelated_to_tokens,
    note_gather,
    note_module_call,
    note_opaque_outputs,
    unchecked_modules,
)
from meshwright.model.sequence_analysis.captured_tokens import find_captured_tokens
from meshwright.model.sequence_analysis.conv_rules import analyze_convolution, propagate_op
from meshwright.model.sequence_analysis.equal_block_traces import BlockCallTrace, EqualBlockTraces
from meshwright.model.sequence_analysis.glue_gather_trace import GatherTrace
from meshwright.model.sequence_analysis.replicated_blocks import try_replicated, try_replicated_pooling
from meshwright.model.sequence_analysis.token_rules import (
    ATTENDS_WITHOUT_SDPA,
    MADE_IN_BLOCK,
    SHARDED,
    TokenLayout,
    TokenLayouts,
    TokenOp,
    find_token_dims,
)
from meshwright.model.sequence_analysis.trial_lengths import ComputedOp, TrialLengths, recompute_reason
from meshwright.model.tensors.call_description import function_title
from meshwright.model.tensors.inplace_leaf_alias import make_alias
from meshwright.model.tensors.pytree import named_tensors, replace_tensors, tree_tensors
from meshwright.nn.whole_samples import WholeSamples
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name, block_of
from meshwright.plan.model_spec.sequence_info import (
    AttentionSpec,
    BlockSequenceInfo,
    CapturedTokens,
    ConvSpec,
    SampleGather,
)


@dataclass(eq=False)
class BlockTrace(TorchFunctionMode):
    """Traces one forward of `module`, with the lengths `trial_lengths`; tokens also start in block calls
    `starting_calls`, and `equal_calls` names the first equal block call of some.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    on_block_call: Callable[[str], None]
    fake_mode: FakeTensorMode
    trial_lengths: TrialLengths
    starting_calls: Collection[str] = ()
    equal_calls: Mapping[str, str] = field(default_factory=dict)
    block_calls: dict[str, BlockSequenceInfo] = field(default_factory=dict)
    attention_calls: list[AttentionSpec] = field(default_factory=list)
    conv_calls: list[ConvSpec] = field(default_factory=list)
    sample_gathers: list[SampleGather] = field(default_factory=list)
    reads_values: bool = False  # glue reads values of tensors
    has_untracked_writes: bool = False  # glue may write to memory that no hook sees
    ops: dict[str, list[ComputedOp]] = field(default_factory=dict)
    calls_attending_elsewhere: list[str] = field(default_factory=list)
    token_layouts: TokenLayouts = field(default_factory=WeakIdKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()
        self._block_call: TracedBlockCall | None = None
        self._last_block_call = ""
        self._gathered_tensors = GatheredTensors(SequenceShardedTensor)
        self.gathers = GatherTrace(self.trial_lengths)
        self._num_calls: Counter[str] = Counter()
        self._traces = EqualBlockTraces(self.equal_calls)

    @property
    def prime_product(self) -> int:
        """The product of the primes that mark token dims."""
        return self.trial_lengths.prime_product

    def _full_shard(self, length: int) -> TokenShard:
        return TokenShard(length, ((0, length),), self._gather, self._sum)

    def _planned_shard(self, length: int) -> TokenShard:
        return self._full_shard(self.trial_lengths.prime(length))

    def run(self, batch: Mapping[str, torch.Tensor], loss: Callable[[Any], torch.Tensor | None]) -> None:
        """Runs the forward on `batch`, with all tokens on the only rank, and the `loss` of its outputs."""
        self.on_block_call("")
        with self:
            outputs, self._last_block_call = self.module(**batch), ""
            try:
                loss_value = loss(outputs)
            except PlanError:
                raise
            except Exception:  # it needs values or other outputs; a real error shows in the first step
                loss_value, self.reads_values = None, True
        self.gathers.finish(outputs, loss_value)

    @contextmanager
    def trace_blocks(self) -> Iterator[None]:
        """Patches the blocks of the module so that they take and return tokens like a rank with a shard."""
        inner_ids = {id(part) for block in self.blocks.values() for part in block.modules()} - {
            id(each) for each in self.blocks.values()
        }
        unchecked_ids = unchecked_modules(self.module)
        own_forwards = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        get_shards = lambda queries, keys: (self._full_shard(queries), self._full_shard(keys))  # noqa: E731  what a name would say twice
        patched = patch_attention(self.module, get_shards, torch._C.DisableTorchFunction, self._note_bias)
        handles = list[RemovableHandle]()
        for name, part in self.module.named_modules():
            group_by_sample(part)
            if id(part) in inner_ids:
                unchecked = id(part) in unchecked_ids
                handles.append(part.register_forward_pre_hook(partial(self._enter_module, name, unchecked)))
                handles.append(part.register_forward_hook(partial(self._leave_module, unchecked)))
        for name, block in self.blocks.items():
            block.forward = partial(self._run_block, name, block, block.forward)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            patched.restore()
            for name, block in self.blocks.items():
                block.__dict__.pop("forward", None)
                if own_forwards[name] is not None:
                    block.__dict__["forward"] = own_forwards[name]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, block_call = kwargs or {}, self._block_call
        result = func(*args, **kwargs)
        if block_call is None:
            self.reads_values = self.reads_values or reads_values(func.__name__.strip("_"))
            self.has_untracked_writes = self.has_untracked_writes or function_title(func) in UNTRACKED_ACCESS
            self._check_glue(args, kwargs, result)
            self._gathered_tensors.check_write(func.__name__, args, kwargs)
            return result
        name = function_title(func).removesuffix(" of").strip("_")
        if not block_call.num_unchecked:
            self.ops.setdefault(block_call.name, []).append(
                ComputedOp.from_call(block_call.open_modules[-1][0], name, args, kwargs)
            )
        if func is F.scaled_dot_product_attention:
            self._note_attention(block_call, SDPAArguments(*args, **kwargs), result)
        elif not block_call.num_unchecked:
            op = TokenOp(name, args, kwargs, tree_tensors(result), self.token_layouts, self.prime_product)
            block_call.reads_tokens = block_call.reads_tokens or bool(
                op.results
                and (
                    op.operands_of_kind("sharded")
                    or op.operands_of_kind("mask")
                    or op.operands_of_kind("keys")
                )
            )
            self._note(
                block_call, self._note_convolution(block_call, op) if func is F.conv1d else propagate_op(op)
            )
        return result

    def _note_bias(self, bias: torch.Tensor) -> None:
        """Notes a positional bias: rows of local queries, columns of all keys."""
        self.token_layouts[bias] = TokenLayout("mask")

    def _check_glue(self, args: Any, kwargs: Any, result: Any) -> None:
        """Notes glue that gets tensors from inside a block other than its outputs."""
        if (
            self._last_block_call
            and tree_tensors(result)
            and any(each in self.token_layouts for each in tree_tensors((args, kwargs)))
        ):
            block_info = self.block_calls[self._last_block_call]
            reason = (
                f"{block_of(self._last_block_call)} passes tokens on outside its outputs, in an "
                f"attribute or a list"
            )
            self.block_calls[self._last_block_call] = replace(
                block_info, not_sequence_parallel=block_info.not_sequence_parallel or reason
            )

    def _note(self, block_call: TracedBlockCall, reason: str) -> None:
        if reason and not block_call.not_sequence_parallel:
            name = block_call.open_modules[-1][0]
            block_call.not_sequence_parallel = f"{name} {reason}" + (
                f": {sdpa_advice(self.module, name)}" if reason.startswith(ATTENDS_WITHOUT_SDPA) else ""
            )

    def _gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        self._gathered_tensors.add(local)
        return self.gathers.add_gather(self._last_block_call, make_alias(local), local.shape[dim])

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Records that glue needs a few tokens, or a sum over all."""
        if part._is_view():
            self._gathered_tensors.add(part)
        return self.gathers.add_gather(self._last_block_call, make_alias(part))

    def _run_block(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a block call; a block inside another one, or without gradients, is none."""
        if self._block_call is not None or not torch.is_grad_enabled():
            if self._block_call is None and find_sharded_tensors((args, kwargs)):
                raise PlanError(f"{name} {recompute_reason()}", fix="set mesh.cp = 1", location="model")
            return forward(*args, **kwargs)
        self._num_calls[name] += 1
        block_call = TracedBlockCall(block_call_name(name, self._num_calls[name]), [(name, block)])
        arg_paths = tuple(slot for slot, _ in named_tensors((args, kwargs)))
        is_sharded = bool(find_sharded_tensors((args, kwargs)))
        block_inputs = self._enter_block(block_call, (args, kwargs), is_sharded=is_sharded)
        key = self._trace_key(block_call, (args, kwargs), block_inputs)
        original = tree_tensors((args, kwargs))
        args, kwargs = replace_tensors((args, kwargs), block_inputs.replacements)
        self._last_block_call, side_channels = block_call.name, capture_marks()
        self.on_block_call(block_call.name)
        if (trace := self._traces.find(key, block_call.name)) is not None:
            return self._repeat_block(trace, (args, kwargs))
        self._block_call = block_call
        try:
            with self.fake_mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._block_call = None
        captured = self._find_captured(block_call, side_channels)
        note_opaque_outputs(block_call, outputs, self.prime_product)
        output_dims = tuple(self._output_token_dims(block_call, each) for each in tree_tensors(outputs))
        if block_call.attends_elsewhere and block_inputs.has_tokens:
            self._note(block_call, "attends to other tokens than its own")
        block_info = BlockSequenceInfo(
            block_call.name,
            tuple(block_inputs.token_dims),
            output_dims,
            block_call.not_sequence_parallel,
            arg_paths,
            input_num_tokens=tuple(block_inputs.num_tokens),
        )
        if block_info.not_sequence_parallel and not block_call.leaks_tokens:
            block_info = self._try_full_sequences(
                block_call, block_info, block_inputs, outputs, is_sharded=is_sharded
            )
        local = captured if not block_info.is_replicated else [None] * len(captured)
        block_info = replace(block_info, captured=tuple(local))
        passed_on = [outputs, [mark.added_tensors for mark in side_channels]]
        self.gathers.leave_block(block_call.name, passed_on, is_replicated=block_info.is_replicated)
        expose_captured(side_channels, local, self._planned_shard)
        if not captured:
            calls = self.attention_calls, self.conv_calls, self.sample_gathers
            specs = calls, self.ops.get(block_call.name, [])
            values = original, (args, kwargs), outputs
            self._traces.add(key, block_call, block_info, specs, values, self.token_layouts)
        return self._wrap_outputs(block_info, outputs, block_call.module_num_tokens)

    def _trace_key(self, block_call: TracedBlockCall, value: Any, block_inputs: BlockInputs) -> Any:
        if block_call.name in self.starting_calls:
            return None
        return self._traces.key(block_call, value, block_inputs, self.token_layouts)

    def _repeat_block(self, trace: BlockCallTrace, given: Any) -> Any:
        """Returns the outputs of a block call that has the trace of an equal one."""
        name = trace.block_call.name
        self.attention_calls += trace.attention_calls
        self.conv_calls += trace.conv_calls
        self.sample_gathers += trace.sample_gathers
        if trace.ops:
            self.ops[name] = trace.ops
        outputs = trace.make_outputs(given, self.token_layouts, self.fake_mode)
        self.gathers.leave_block(name, [outputs, []], is_replicated=False)
        return self._wrap_outputs(trace.info, outputs, trace.block_call.module_num_tokens)

    def _enter_block(self, block_call: TracedBlockCall, inputs: Any, *, is_sharded: bool) -> BlockInputs:
        """Returns what is known of the inputs of a block call; `is_sharded`: some are sharded."""
        starts_tokens = block_call.name in self.starting_calls
        block_inputs = analyze_block_inputs(
            inputs, self.trial_lengths, self.token_layouts, starts_tokens=starts_tokens
        )
        self.gathers.enter_block(
            self._last_block_call, inputs, block_inputs.token_dims, block_inputs.replacements
        )
        self._note(block_call, block_inputs.not_sequence_parallel)
        self._note(block_call, recompute_reason() if is_sharded else "")
        block_call.replicated_masks = frozenset(block_inputs.replicated_masks)
        return block_inputs

    def _find_captured(
        self, block_call: TracedBlockCall, side_channels: Sequence[CaptureMark]
    ) -> list[CapturedTokens | None]:
        """Returns the tokens of captured tensors, and notes the channels with some that cannot be passed
        on.
        """
        captured, leaks = find_captured_tokens(side_channels, self.token_layouts, self.trial_lengths)
        for channel in leaks:
            block_call.leaks_tokens = True
            self._note(block_call, f"passes {channel} on outside its outputs")
        return captured

    def _try_full_sequences(
        self,
        block_call: TracedBlockCall,
        block_info: BlockSequenceInfo,
        block_inputs: BlockInputs,
        outputs: Any,
        *,
        is_sharded: bool,
    ) -> BlockSequenceInfo:
        """A block call without attention that cannot run on a shard may run on all tokens, on every rank."""
        own_attention = any(each.block_call == block_call.name for each in self.attention_calls)
        if own_attention if is_sharded else block_call.calls_attention:
            return block_info
        if is_sharded and block_call.reads_tokens:
            block_info = try_replicated_pooling(block_info, outputs, self.prime_product)
        else:
            block_info = try_replicated(block_info, outputs, block_inputs, self.trial_lengths)
        if not block_info.not_sequence_parallel:
            name = block_call.name
            self.conv_calls = [each for each in self.conv_calls if each.block_call != name]
            self.sample_gathers = [each for each in self.sample_gathers if each.block_call != name]
        return block_info

    def _wrap_outputs(self, block_info: BlockSequenceInfo, outputs: Any, rows: Mapping[str, int]) -> Any:
        outputs_and_dims = list(zip(tree_tensors(outputs), block_info.output_token_dims, strict=True))
        num_tokens = tuple(
            self.trial_lengths.planned_length(each.shape[dims[0]]) if dims else 0
            for each, dims in outputs_and_dims
        )
        block_info = replace(block_info, output_num_tokens=num_tokens)
        module_lengths = tuple(
            (name, count) for name, count in rows.items() if count != block_info.num_sharded_tokens(0) > 0
        )
        self.block_calls[block_info.block_call] = replace(block_info, module_num_tokens=module_lengths)
        output_shards = [
            (dims[0], self._full_shard(self.trial_lengths.glue_length(each.shape[dims[0]]))) if dims else None
            for each, dims in outputs_and_dims
        ]
        resized = {
            id(each): self.trial_lengths.resize_for_glue(each) for each, dims in outputs_and_dims if dims
        }
        return wrap_block_outputs(replace_tensors(outputs, resized), output_shards)

    def _output_token_dims(self, block_call: TracedBlockCall, tensor: torch.Tensor) -> tuple[int, ...]:
        dims, layout = find_token_dims(tensor, self.prime_product), self.token_layouts.get(tensor)
        if layout is not None and layout.kind in ("subset", "padded"):
            self._note(block_call, layout.origin)
            self.token_layouts.pop(tensor)  # glue may use it if the block call runs on full sequences
        if not dims or (layout is not None and layout.kind == "keys"):
            return ()
        if layout is None:
            block_call.reads_tokens = True  # of unknown origin
            self._note(
                block_call,
                "returns tokens that were not among its inputs: from an attribute, "
                "or from code that is not followed",
            )
        elif layout.kind == "from_length":
            self._note(block_call, MADE_IN_BLOCK.format(layout.origin))
        if any(tensor.shape[dim] not in self.trial_lengths.planned_lengths for dim in dims):
            shape = describe_shape(tensor, self.trial_lengths)
            self._note(
                block_call,
                f"returns a tensor of shape {shape}, in which tokens are merged with another dim",
            )
            return ()
        return dims

    def _note_attention(self, block_call: TracedBlockCall, given: SDPAArguments, made: torch.Tensor) -> None:
        if is_unrelated_to_tokens(given, self.trial_lengths):
            block_call.attends_elsewhere = True
            self.calls_attending_elsewhere += (
                [] if block_call.name in self.calls_attending_elsewhere else [block_call.name]
            )
            return
        block_call.calls_attention = True
        self._note(block_call, recompute_reason())
        is_causal = any(vars(module).get("is_causal") is True for _, module in block_call.open_modules)
        tensors_found = describe_attention_call(
            block_call, given, self.token_layouts, self.trial_lengths, declared_causal=is_causal
        )
        if isinstance(tensors_found, AttentionSpec):
            self.token_layouts[made] = SHARDED
            self.attention_calls.append(tensors_found)
        else:
            self._note(block_call, tensors_found)

    def _note_convolution(self, block_call: TracedBlockCall, op: TokenOp) -> str:
        """Notes a convolution. Returns why it cannot run on a shard."""
        reason, tensors_found = analyze_convolution(op)
        attended = sum(each.block_call == block_call.name for each in self.attention_calls)
        where = {
            "block_call": block_call.name,
            "module": block_call.open_modules[-1][0],
            "num_tokens": self.trial_lengths.planned_lengths.get(tensors_found.num_tokens, 0),
        }
        self.conv_calls.append(
            replace(
                tensors_found,
                **where,
                num_prior_attention_calls=attended,
                prior_layers=tuple(block_call.finished_modules),
            )
        )
        return reason

    def _enter_module(self, name: str, unchecked: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._block_call is not None:
            note_module_call(self._block_call, name, args, self.trial_lengths)
            self._block_call.open_modules.append((name, module))
            self._block_call.num_unchecked += unchecked
            if isinstance(module, WholeSamples):
                calls = self.attention_calls, self.sample_gathers
                self._note(self._block_call, note_gather(self._block_call, args, calls, self.trial_lengths))

    def _leave_module(self, unchecked: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends a module inside a block; outputs of one that is not checked have tokens like its inputs."""
        if self._block_call is None or not self._block_call.end_module(module):
            return
        self._block_call.num_unchecked -= unchecked
        for each in tree_tensors(output) if unchecked else ():
            if find_token_dims(each, self.prime_product):
                self.token_layouts[each] = SHARDED
