"""Gives block calls that equal an earlier one its trace, without running them again.

    layers.0    runs, operation by operation: its trace is kept under what it was given
    layers.1    equal in the recorded forward, given the same: new outputs, and the trace of layers.0

What glue sees must not differ: the outputs have the same shapes, and graphs that lead back to the same
inputs. Only a block call that can run on a sequence shard is taken for another one: what keeps a block from
that is told of the block itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from meshwright.model.blocks.recorded_block_calls import OutputTensor, call_signature, input_numbers
from meshwright.model.context_parallel.sharded_activation import SequenceShardedTensor
from meshwright.model.sequence_analysis.block_input_token_dims import BlockInputs, TracedBlockCall
from meshwright.model.sequence_analysis.glue_gather_trace import grad_edge, reachable_edges
from meshwright.model.sequence_analysis.token_rules import TokenLayout, TokenLayouts
from meshwright.model.sequence_analysis.trial_lengths import ComputedOp
from meshwright.model.tensors.pytree import (
    map_leaves,
    tree_tensors,
)
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.model_spec.sequence_info import (
    AttentionSpec,
    BlockSequenceInfo,
    ConvSpec,
    SampleGather,
)

Calls = tuple[list[AttentionSpec], list[ConvSpec], list[SampleGather]]


@dataclass(eq=False)
class BlockCallTrace:
    """The trace of a finished block call: what it was given and returned, and what its operations are."""

    block_call: TracedBlockCall
    info: BlockSequenceInfo
    attention_calls: list[AttentionSpec]
    conv_calls: list[ConvSpec]
    sample_gathers: list[SampleGather]
    ops: list[ComputedOp]
    given: Any  # keeps its tensors alive, by whose ids it is found
    outputs: Any
    tensors: list[OutputTensor]
    layouts: list[TokenLayout | None]  # of these tensors
    sources: list[int]  # inputs to which the graphs of new outputs lead

    def for_call(self, name: str) -> "BlockCallTrace":
        """Returns the same trace of the block call `name`."""
        before, after = block_of(self.block_call.name), block_of(name)

        def rename(module: str) -> str:
            return after + module.removeprefix(before)

        def new_place(each: ConvSpec | SampleGather) -> dict[str, Any]:
            prior_layers = tuple(map(rename, each.prior_layers))
            return {"block_call": name, "module": rename(each.module), "prior_layers": prior_layers}

        call = replace(
            self.block_call,
            name=name,
            open_modules=[(after, self.block_call.open_modules[0][1])],
            module_num_tokens={
                rename(module): count for module, count in self.block_call.module_num_tokens.items()
            },
        )
        return replace(
            self,
            block_call=call,
            info=replace(self.info, block_call=name),
            attention_calls=[replace(each, block_call=name) for each in self.attention_calls],
            conv_calls=[replace(each, **new_place(each)) for each in self.conv_calls],
            sample_gathers=[replace(each, **new_place(each)) for each in self.sample_gathers],
            ops=[replace(each, module=rename(each.module)) for each in self.ops],
        )

    def make_outputs(self, given: Any, layouts: TokenLayouts, mode: FakeTensorMode) -> Any:
        """Returns outputs of an equal block call on `given`, and notes their `layouts`."""
        inputs = tree_tensors(given)
        with torch._C.DisableTorchFunction(), mode:
            new = [each for each in self.tensors if each.input_number < 0]
            roots = [inputs[number] for number in self.sources]
            if any(each.needs_grad for each in new) and not roots:
                roots = [torch.empty(0, requires_grad=True)]
            made = iter(_NewOutputs.apply(new, *roots) if new else ())
            tensors = [
                inputs[each.input_number] if each.input_number >= 0 else next(made) for each in self.tensors
            ]
        for tensor, each, layout in zip(tensors, self.tensors, self.layouts, strict=True):
            if layout is not None and each.input_number < 0:
                layouts[tensor] = layout
        order = iter(tensors)
        return map_leaves(self.outputs, lambda leaf: next(order) if isinstance(leaf, torch.Tensor) else leaf)


class _NewOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Sequence[OutputTensor], *roots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = tuple(each.make() for each in outputs)
        ctx.mark_non_differentiable(
            *(tensor for tensor, each in zip(made, outputs, strict=True) if not each.needs_grad)
        )
        return made


@dataclass
class EqualBlockTraces:
    """The traces of finished block calls; `equal_calls` names the first equal block call of some."""

    equal_calls: Mapping[str, str]
    _traces: dict[Any, BlockCallTrace] = field(default_factory=dict)

    def key(
        self, block_call: TracedBlockCall, value: Any, block_inputs: BlockInputs, layouts: TokenLayouts
    ) -> Any:
        """Returns what block calls share that have one trace; None if this one has a trace of its own.

        `value` are the arguments that glue gives, of which `block_inputs` are known.
        """
        first = self.equal_calls.get(block_call.name, block_call.name)
        if block_call.not_sequence_parallel or first not in self._firsts:
            return None
        seen: dict[int, int] = {}
        return first, call_signature(
            value, lambda tensor: self._tensor_key(tensor, seen, block_inputs, layouts)
        )

    def find(self, key: Any, name: str) -> BlockCallTrace | None:
        """Returns the trace of the block call `name` if that of an equal one is known."""
        found = None if key is None else self._traces.get(key)
        return None if found is None else found.for_call(name)

    def add(
        self,
        key: Any,
        block_call: TracedBlockCall,
        info: BlockSequenceInfo,
        specs: tuple[Calls, list[ComputedOp]],
        values: tuple[Any, Any, Any],
        layouts: TokenLayouts,
    ) -> None:
        """Keeps the trace of a block call, if an equal one may have the same.

        `specs` are the attention calls, convolutions and gathers so far, and its operations; `values` what
        glue gave, that on which the block ran, and what it returned.
        """
        if key is None or info.not_sequence_parallel or info.is_replicated or block_call.attends_elsewhere:
            return
        original, given, outputs = values
        numbers = input_numbers(given)
        tensors = [OutputTensor(each, numbers) for each in tree_tensors(outputs)]
        sources = _sources(
            tree_tensors(given),
            [
                tensor
                for tensor, each in zip(tree_tensors(outputs), tensors, strict=True)
                if each.input_number < 0 and each.needs_grad
            ],
        )
        if sources is None or len({id(each) for each in tree_tensors(outputs)}) < len(tensors):
            return
        calls, ops = specs
        self._traces[key] = BlockCallTrace(
            block_call,
            info,
            [each for each in calls[0] if each.block_call == block_call.name],
            [each for each in calls[1] if each.block_call == block_call.name],
            [each for each in calls[2] if each.block_call == block_call.name],
            ops,
            (original, given),
            outputs,
            tensors,
            [layouts.get(each) for each in tree_tensors(outputs)],
            sources,
        )

    @property
    def _firsts(self) -> frozenset[str]:
        return frozenset(self.equal_calls.values())

    def _tensor_key(
        self, tensor: torch.Tensor, seen: dict[int, int], block_inputs: BlockInputs, layouts: TokenLayouts
    ) -> Any:
        number = seen.setdefault(id(tensor), len(seen))
        sharded = (
            (tensor.sequence_dim, tensor.token_shard.length) if type(tensor) is SequenceShardedTensor else ()
        )
        inner = block_inputs.replacements.get(id(tensor), tensor)
        local = tensor.local_tensor if type(tensor) is SequenceShardedTensor else tensor
        return (
            number,
            sharded,
            None if type(local) is FakeTensor else id(tensor),  # the values of another one may differ
            inner.shape,
            inner.stride(),
            inner.dtype,
            inner.requires_grad,
            layouts.get(inner),
            id(inner) in block_inputs.replicated_masks,
        )


def _sources(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[int] | None:
    """Returns the inputs to which the graphs of all `outputs` lead; None if they lead to different ones."""
    edges = [grad_edge(each) for each in inputs]
    ends = {edge[0] for edge in edges if edge is not None}
    found = None
    for output in outputs:
        start = grad_edge(output)
        reached = set() if start is None else reachable_edges([start], ends)
        numbers = [number for number, edge in enumerate(edges) if edge is not None and edge in reached]
        if found is not None and found != numbers:
            return None
        found = numbers
    return found or []
