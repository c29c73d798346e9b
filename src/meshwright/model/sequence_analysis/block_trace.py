"""What visits do with tokens, as one forward shows that runs on all of them: what they take in and give out, and what mixes.

A block is given tensors of its own in place of those of glue, so that nobody else has them: what glue computes with is what
blocks give out, and a tensor of a block's that it gets hold of otherwise is found.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
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

from meshwright.model.blocks.inplace_writes import UNTRACKED_ACCESS, GatheredTensors
from meshwright.model.hf.metadata import sdpa_advice
from meshwright.model.hf.output_capture import capture_marks
from meshwright.model.sequence_analysis.block_inputs import (
    BlockInputs,
    TracedBlockCall,
    analyze_block_inputs,
    describe_attention_call,
    describe_shape,
    is_unrelated_to_tokens,
    note_module_call,
)
from meshwright.model.sequence_analysis.conv_rules import analyze_convolution, propagate_op
from meshwright.model.sequence_analysis.gathers import GatherTrace
from meshwright.model.sequence_analysis.lengths import ComputedOp, TrialLengths, recompute_reason
from meshwright.model.sequence_analysis.token_rules import (
    ATTENDS_WITHOUT_SDPA,
    MADE_IN_BLOCK,
    SHARDED,
    TokenLayout,
    TokenLayouts,
    TokenOp,
    find_token_dims,
)
from meshwright.model.sequence_parallel.attention_call import SDPAArguments
from meshwright.model.sequence_parallel.hf_attention import patch_attention
from meshwright.model.sequence_parallel.sharded_activation import (
    SequenceShardedTensor,
    find_sharded_tensors,
    wrap_block_outputs,
)
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.model.tensor_parallel.layer_roles import find_layer_roles
from meshwright.model.tensors.function_modes import function_title
from meshwright.model.tensors.grad_alias import make_alias
from meshwright.model.tensors.op_tables import reads_values
from meshwright.model.tensors.pytree import named_tensors, replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_call_name, block_of
from meshwright.plan.model_spec.sequence_info import AttentionSpec, BlockSequenceInfo, ConvSpec


@dataclass(eq=False)
class BlockTrace(TorchFunctionMode):
    """What a forward of `module` does with tokens, of which there are as many as `sizes` says; some begin in visits `begins`."""

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    on_block_call: Callable[[str], None]
    fake_mode: FakeTensorMode
    trial_lengths: TrialLengths
    starting_calls: Collection[str] = ()
    block_calls: dict[str, BlockSequenceInfo] = field(default_factory=dict)
    attention_calls: list[AttentionSpec] = field(default_factory=list)
    conv_calls: list[ConvSpec] = field(default_factory=list)
    reads_values: bool = False  # between blocks, at values
    has_untracked_writes: bool = False  # between blocks, memory is handed out
    ops: dict[str, list[ComputedOp]] = field(default_factory=dict)
    calls_attending_elsewhere: list[str] = field(default_factory=list)
    token_layouts: TokenLayouts = field(default_factory=WeakIdKeyDictionary)

    def __post_init__(self) -> None:
        super().__init__()
        self._block_call: TracedBlockCall | None = None
        self._last_block_call = ""
        self._gathered_tensors, self.gathers = (
            GatheredTensors(SequenceShardedTensor),
            GatherTrace(self.trial_lengths),
        )
        self._num_calls: Counter[str] = Counter()

    @property
    def prime_product(self) -> int:
        """The primes by which tokens are told."""
        return self.trial_lengths.prime_product

    def _full_shard(self, length: int) -> TokenShard:
        return TokenShard(length, ((0, length),), self._gather, self._sum)

    def run(self, batch: Mapping[str, torch.Tensor], loss: Callable[[Any], torch.Tensor | None]) -> None:
        """Run the forward on `rows`, which have all tokens on every rank, and take the `loss` of what it gives out."""
        self.on_block_call("")
        with self:
            outputs, self._last_block_call = self.module(**batch), ""
            try:
                total = loss(outputs)
            except Exception:  # it needs values, or other outputs: if it is wrong, the first step shows where
                total, self.reads_values = None, True
        self.gathers.finish(outputs, total)

    @contextmanager
    def trace_blocks(self) -> Iterator[None]:
        """Meanwhile, the blocks of the module take in and give out tokens as they do on a rank that has some."""
        inner = {id(part) for block in self.blocks.values() for part in block.modules()} - {
            id(each) for each in self.blocks.values()
        }
        experts = {socket.name for socket in find_layer_roles(self.module) if socket.kind == "experts"}
        before = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        shares = lambda queries, keys: (self._full_shard(queries), self._full_shard(keys))  # noqa: E731  what a name would say twice
        plugged = patch_attention(self.module, shares, torch._C.DisableTorchFunction, self._note_bias)
        handles = list[RemovableHandle]()
        for name, part in self.module.named_modules():
            if (
                id(part) in inner
            ):  # those of transformers run otherwise on trial (model/configs.py), and each way token by token
                aside = name in experts and type(part).__module__.startswith("transformers.")
                handles.append(part.register_forward_pre_hook(partial(self._enter_module, name, aside)))
                handles.append(part.register_forward_hook(partial(self._leave_module, aside)))
        for name, block in self.blocks.items():
            block.forward = partial(self._run_block, name, block, block.forward)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            plugged.restore()
            for name, block in self.blocks.items():
                block.__dict__.pop("forward", None)
                if before[name] is not None:
                    block.__dict__["forward"] = before[name]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, visit = kwargs or {}, self._block_call
        result = func(*args, **kwargs)
        if visit is None:
            self.reads_values = self.reads_values or reads_values(func.__name__.strip("_"))
            self.has_untracked_writes = self.has_untracked_writes or function_title(func) in UNTRACKED_ACCESS
            self._check_glue(args, kwargs, result)
            self._gathered_tensors.check_write(func.__name__, args, kwargs)
            return result
        name = function_title(func).removesuffix(" of").strip("_")
        if not visit.num_open_experts:
            self.ops.setdefault(visit.name, []).append(
                ComputedOp.from_call(visit.open_modules[-1][0], name, args, kwargs)
            )
        if func is F.scaled_dot_product_attention:
            self._note_attention(visit, SDPAArguments(*args, **kwargs), result)
        elif not visit.num_open_experts:
            step = TokenOp(name, args, kwargs, tree_tensors(result), self.token_layouts, self.prime_product)
            visit.reads_tokens = visit.reads_tokens or bool(
                step.results
                and (
                    step.operands_of_kind("sharded")
                    or step.operands_of_kind("mask")
                    or step.operands_of_kind("keys")
                )
            )
            self._note(visit, self._note_convolution(visit, step) if func is F.conv1d else propagate_op(step))
        return result

    def _note_bias(self, bias: torch.Tensor) -> None:
        """A bias by position is made, rows of own queries and columns of all keys."""
        self.token_layouts[bias] = TokenLayout("mask")

    def _check_glue(self, args: Any, kwargs: Any, result: Any) -> None:
        """Glue computes something: of what lies within blocks, it has no more than they give out."""
        if (
            self._last_block_call
            and tree_tensors(result)
            and any(each in self.token_layouts for each in tree_tensors((args, kwargs)))
        ):
            passing = self.block_calls[self._last_block_call]
            why = f"{block_of(self._last_block_call)} hands tokens on behind what it gives out, in an attribute or a list"
            self.block_calls[self._last_block_call] = replace(
                passing, not_sequence_parallel=passing.not_sequence_parallel or why
            )

    def _note(self, visit: TracedBlockCall, why: str) -> None:
        if why and not visit.not_sequence_parallel:
            name = visit.open_modules[-1][0]
            visit.not_sequence_parallel = f"{name} {why}" + (
                f": {sdpa_advice(self.module, name)}" if why.startswith(ATTENDS_WITHOUT_SDPA) else ""
            )

    def _gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        """Glue, or a mask, needs all tokens of what a rank has some of."""
        self._gathered_tensors.add(local)
        return self.gathers.add_gather(self._last_block_call, make_alias(local), local.shape[dim])

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Glue needs a few tokens, or a sum of all."""
        if part._is_view():
            self._gathered_tensors.add(part)
        return self.gathers.add_gather(self._last_block_call, make_alias(part))

    def _run_block(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """A block runs; within another one, or without gradients, it is no visit."""
        if self._block_call is not None or not torch.is_grad_enabled():
            if self._block_call is None and find_sharded_tensors((args, kwargs)):
                raise PlanError(f"{name} {recompute_reason()}", fix="set mesh.cp = 1", location="model")
            return forward(*args, **kwargs)
        self._num_calls[name] += 1
        visit = TracedBlockCall(block_call_name(name, self._num_calls[name]), [(name, block)])
        slots = tuple(slot for slot, _ in named_tensors((args, kwargs)))
        takes = analyze_block_inputs(
            (args, kwargs),
            self.trial_lengths,
            self.token_layouts,
            starts_tokens=visit.name in self.starting_calls,
        )
        self.gathers.enter_block(self._last_block_call, (args, kwargs), takes.token_dims, takes.replacements)
        self._note(visit, takes.not_sequence_parallel)
        new, alone = takes.replacements, not find_sharded_tensors((args, kwargs))
        self._note(visit, "" if alone else recompute_reason())
        args, kwargs = replace_tensors((args, kwargs), new)
        visit.replicated_masks = frozenset(takes.replicated_masks)
        self._block_call, self._last_block_call, capturing = visit, visit.name, capture_marks()
        self.on_block_call(visit.name)
        try:
            with self.fake_mode:
                outputs = forward(*args, **kwargs)
        finally:
            self._block_call = None
        replace_tensors(
            (args, kwargs),
            {id(new[id(each)]): each for each in tree_tensors((args, kwargs)) if id(each) in new},
        )
        for mark in capturing:
            for each in tree_tensors(mark.added_tensors):
                visit.leaks_tokens = visit.leaks_tokens or bool(find_token_dims(each, self.prime_product))
                self._note(
                    visit, f"hands {mark.channel} on behind what it gives out" if visit.leaks_tokens else ""
                )
                self.token_layouts.pop(each, None)
        gives = tuple(self._output_token_dims(visit, each) for each in tree_tensors(outputs))
        self._note(
            visit,
            "attends to something else than its own tokens"
            if visit.attends_elsewhere and takes.has_tokens
            else "",
        )
        passing = BlockSequenceInfo(
            visit.name,
            tuple(takes.token_dims),
            gives,
            visit.not_sequence_parallel,
            slots,
            input_num_tokens=tuple(takes.num_tokens),
        )
        own = (
            visit.calls_attention
            if alone
            else any(each.block_call == visit.name for each in self.attention_calls)
        )
        if visit.not_sequence_parallel and not visit.leaks_tokens and not own:
            passing = (
                self._try_replicated(passing, outputs, takes)
                if alone or not visit.reads_tokens
                else self._try_replicated_pooling(passing, outputs)
            )
            self.conv_calls = [
                each
                for each in self.conv_calls
                if passing.not_sequence_parallel or each.block_call != visit.name
            ]
        self.gathers.leave_block(visit.name, outputs, is_replicated=passing.is_replicated)
        return self._wrap_outputs(passing, outputs, visit.module_num_tokens)

    def _wrap_outputs(self, passing: BlockSequenceInfo, outputs: Any, rows: Mapping[str, int]) -> Any:
        """A block has been left: what glue is given of its outputs."""
        pairs = list(zip(tree_tensors(outputs), passing.output_token_dims, strict=True))
        of = tuple(
            self.trial_lengths.planned_length(each.shape[dims[0]]) if dims else 0 for each, dims in pairs
        )
        passing = replace(passing, output_num_tokens=of)
        within = tuple(
            (name, count) for name, count in rows.items() if count != passing.num_sharded_tokens(0) > 0
        )
        self.block_calls[passing.block_call] = replace(passing, module_num_tokens=within)
        told = [
            (dims[0], self._full_shard(self.trial_lengths.glue_length(each.shape[dims[0]]))) if dims else None
            for each, dims in pairs
        ]
        back = {id(each): self.trial_lengths.resize_for_glue(each) for each, dims in pairs if dims}
        return wrap_block_outputs(replace_tensors(outputs, back), told)

    def _try_replicated(
        self, passing: BlockSequenceInfo, outputs: Any, takes: BlockInputs
    ) -> BlockSequenceInfo:
        """A visit that cannot run on some of the tokens, and may run on all: it is given no other's; as it was, if it may not."""
        found, none = tree_tensors(outputs), ((),) * len(passing.input_token_dims)
        gives = tuple(find_token_dims(each, self.prime_product) for each in found)
        told = [
            each.shape[dims[0]] in self.trial_lengths.planned_lengths
            for each, dims in zip(found, gives, strict=True)
            if len(dims) == 1
        ]
        if told and all(told) and not any(len(dims) > 1 for dims in gives):
            return replace(
                passing,
                input_token_dims=none,
                input_num_tokens=(),
                output_token_dims=gives,
                not_sequence_parallel="",
                is_replicated=True,
            )
        if takes.has_tokens:
            return passing
        return replace(
            passing,
            input_token_dims=none,
            input_num_tokens=(),
            output_token_dims=((),) * len(found),
            not_sequence_parallel="",
        )  # some other size is as large

    def _try_replicated_pooling(self, passing: BlockSequenceInfo, outputs: Any) -> BlockSequenceInfo:
        """A visit that gives out no tokens: every rank may run it on all of them, brought together for it."""
        pools = bool(passing.output_token_dims) and not any(
            find_token_dims(each, self.prime_product) for each in tree_tensors(outputs)
        )
        return (
            replace(
                passing,
                input_token_dims=((),) * len(passing.input_token_dims),
                input_num_tokens=(),
                not_sequence_parallel="",
                is_replicated=True,
            )
            if pools
            else passing
        )

    def _output_token_dims(self, visit: TracedBlockCall, tensor: torch.Tensor) -> tuple[int, ...]:
        """Which dims of a tensor that a visit gives out are tokens."""
        dims, along = find_token_dims(tensor, self.prime_product), self.token_layouts.get(tensor)
        if along is not None and along.kind in ("subset", "padded"):
            self._note(visit, along.origin)
            self.token_layouts.pop(tensor)  # glue may compute with it, if the visit runs on all tokens
        if not dims or (along is not None and along.kind == "keys"):
            return ()
        if along is None:
            visit.reads_tokens = True  # who knows what
            self._note(
                visit,
                "gives out tokens that it was not given: put into an attribute, or made by code out of sight",
            )
        elif along.kind == "from_length":
            self._note(visit, MADE_IN_BLOCK.format(along.origin))
        if any(tensor.shape[dim] not in self.trial_lengths.planned_lengths for dim in dims):
            shape = describe_shape(tensor, self.trial_lengths)
            self._note(
                visit, f"gives out a tensor of shape {shape}, in which tokens are merged with another dim"
            )
            return ()
        return dims

    def _note_attention(self, visit: TracedBlockCall, given: SDPAArguments, made: torch.Tensor) -> None:
        """A visit attends."""
        if is_unrelated_to_tokens(given, self.trial_lengths):
            visit.attends_elsewhere = True
            self.calls_attending_elsewhere += (
                [] if visit.name in self.calls_attending_elsewhere else [visit.name]
            )
            return
        visit.calls_attention = True
        self._note(visit, recompute_reason())
        declared = any(vars(module).get("is_causal") is True for _, module in visit.open_modules)
        found = describe_attention_call(
            visit, given, self.token_layouts, self.trial_lengths, declared_causal=declared
        )
        if isinstance(found, AttentionSpec):
            self.token_layouts[made] = SHARDED
            self.attention_calls.append(found)
        else:
            self._note(visit, found)

    def _note_convolution(self, visit: TracedBlockCall, step: TokenOp) -> str:
        """Note a convolution. Returns why nobody can answer it."""
        why, found = analyze_convolution(step)
        attended = sum(each.block_call == visit.name for each in self.attention_calls)
        where = {
            "block_call": visit.name,
            "module": visit.open_modules[-1][0],
            "num_tokens": self.trial_lengths.planned_lengths.get(found.num_tokens, 0),
        }
        self.conv_calls.append(
            replace(
                found, **where, num_prior_attention_calls=attended, prior_layers=tuple(visit.finished_modules)
            )
        )
        return why

    def _enter_module(self, name: str, aside: bool, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module within a block is called."""
        if self._block_call is not None:
            note_module_call(self._block_call, name, args, self.trial_lengths)
            self._block_call.open_modules.append((name, module))
            self._block_call.num_open_experts += aside

    def _leave_module(self, aside: bool, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module within a block has been left; what experts give out has tokens as what they were given."""
        if (
            self._block_call is None
            or not self._block_call.open_modules
            or self._block_call.open_modules[-1][1] is not module
        ):
            return
        self._block_call.finished_modules.append(self._block_call.open_modules.pop()[0])
        self._block_call.num_open_experts -= aside
        for each in tree_tensors(output) if aside else ():
            dims = find_token_dims(each, self.prime_product)
            if dims:
                self.token_layouts[each] = SHARDED
