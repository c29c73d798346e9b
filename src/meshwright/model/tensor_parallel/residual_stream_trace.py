"""Finds the path of the residual stream through a model, by following it operation by operation in a trial
run.

The residual stream is what a block takes, [samples, tokens, width], and returns in the same shape. A block
can run on a slice of the tokens if it treats each token of the stream by itself, except between colwise and
rowwise layers:

    x --norm--> h --colwise--> (anything: attention) --rowwise--> y --add--> x + y
    followed: x h y x+y        not followed: outputs of colwise layers, which get all tokens

    per token       elementwise arithmetic, norms over the last dim; any other operation is reported
    outer module    a module around colwise layers that takes h and passes it to no other: code in it that
                    reads the shape of h expects all tokens, so they are gathered at its start
    glue            may pass the stream on, and take all of it (`x[:, 0:]`); other operations need all tokens
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from meshwright.model.blocks.block_forward_backward import ForwardDriver
from meshwright.model.tensors.op_tables import is_full_view, reads_values, tokenwise_problem
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, ResidualFlow

# what __torch_function__ receives when a shape is read
SHAPE_ATTRIBUTE: Any = getattr_static(torch.Tensor, "shape")
Blocks = Mapping[str, nn.Module]
OnBlockCall = Callable[[str], None]
LayerCallKey = tuple[str, str, int]  # layer, block call, and number of earlier calls of the layer in it


@dataclass
class ResidualMark:
    """Of one layer call: whether it takes the residual stream, and the outermost module that does, with its
    arguments.
    """

    takes_residual: bool = False
    outer_module: str = ""
    outer_args: tuple[int | str, ...] = ()


@dataclass
class _OpenModule:
    """A running module: the tensors of the stream that it took, by id, and those it computes with."""

    name: str
    module: nn.Module
    role: str
    residual_inputs: dict[int, tuple[int | str, ...]]
    used_inputs: set[int] = field(default_factory=set)
    marks: list[tuple[int, ResidualMark]] = field(default_factory=list)


@dataclass
class _OpenBlockCall:
    name: str
    arg: int | str = ""
    shape: tuple[int, ...] = ()
    input_needs_grad: bool = True
    not_sequence_parallel: str = ""
    residual_tensors: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    num_calls: Counter = field(default_factory=Counter)


def trace_residual_stream(
    module: nn.Module,
    blocks: Blocks,
    calls: tuple[LayerCall, ...],
    on_block_call: OnBlockCall,
    run_forward: Callable[[], Any],
    *,
    writes_in_place: bool,
) -> tuple[tuple[LayerCall, ...], tuple[ResidualFlow, ...]]:
    """Returns `calls` with their places in the residual stream, and its flow through block calls, from one
    forward.

    `on_block_call` is called with each block call; `writes_in_place` if the model writes into outputs of its
    blocks.
    """
    block_calls: list[str] = []

    def reach(block_call: str) -> None:
        block_calls.append(block_call)
        on_block_call(block_call)

    trace = _ResidualTrace(module, blocks, {call.name: call.role for call in calls}, block_calls)
    driver = ForwardDriver(blocks, in_place=writes_in_place)
    on_block_call("")
    try:
        with trace:
            outputs, _, _ = driver.forward(reach, run_forward)
    finally:
        driver.detach()
        trace.detach()
    return _mark_calls(calls, trace.marks), trace.residual_flows(outputs)


class _ResidualTrace(TorchFunctionMode):
    """Follows the stream through a forward; `block_calls` is filled by the caller in order."""

    def __init__(
        self, module: nn.Module, blocks: Blocks, roles: Mapping[str, str], block_calls: Sequence[str]
    ) -> None:
        super().__init__()
        self.marks: dict[LayerCallKey, ResidualMark] = {}
        self._roles, self._block_calls = roles, block_calls
        self._flows: dict[str, ResidualFlow] = {}
        # block call that returned a tensor, as glue sees it
        self._producers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._consumers: dict[str, list[tuple[str, int | str | None]]] = {}
        self._read_by_glue: set[str] = set()
        self._pending_inputs: list[tuple[str, int | str | None]] | None = (
            None  # inputs of the next block call: producer and argument
        )
        self._block_call: _OpenBlockCall | None = None
        self._open_modules: list[_OpenModule] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._attach(module, blocks)

    def _attach(self, module: nn.Module, blocks: Blocks) -> None:
        inner_ids = {id(part) for block in blocks.values() for part in block.modules()} - {
            id(block) for block in blocks.values()
        }
        for name, part in module.named_modules():
            if id(part) in inner_ids:
                self._handles.append(
                    part.register_forward_pre_hook(partial(self._enter_module, name), with_kwargs=True)
                )
                self._handles.append(part.register_forward_hook(self._leave_module))
        for name, block in blocks.items():
            self._handles.append(block.register_forward_pre_hook(self._before_block, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._after_block))
            self._replaced.append((block, block.__dict__.get("forward")))
            block.forward = partial(self._run_block, name, block, block.forward)

    def detach(self) -> None:
        """Removes all hooks and patches."""
        for handle in self._handles:
            handle.remove()
        for block, own_forward in self._replaced:
            block.__dict__.pop("forward", None)
            if own_forward is not None:
                block.__dict__["forward"] = own_forward

    def residual_flows(self, outputs: Any) -> tuple[ResidualFlow, ...]:
        """Returns the flows of the stream in a forward that returned `outputs`."""
        self._read_by_glue |= {
            self._producers[tensor] for tensor in tree_tensors(outputs) if tensor in self._producers
        }
        flows = dict(self._flows)
        for block_call, consumers in self._consumers.items():
            if block_call in self._read_by_glue or block_call not in flows or len(consumers) != 1:
                continue
            (consumer, arg) = consumers[0]
            if consumer in flows and flows[consumer].arg == arg:
                flows[consumer] = replace(flows[consumer], producer=block_call)
            elif consumer in flows or arg is None:  # it takes the tensor, but not as its residual stream
                continue
            flows[block_call] = replace(flows[block_call], consumer=consumer)
        return tuple(flows.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._block_call is None:
            if self._pending_inputs is None:
                self._note_glue(func, (args, kwargs), result)
        elif not any(frame.role in ("colwise", "rowwise", "lm_head") for frame in self._open_modules):
            self._note_block_op(self._block_call, func, args, kwargs, result)
        return result

    def _note_glue(self, func: Any, given: Any, result: Any) -> None:
        for tensor in tree_tensors(given):
            if tensor not in self._producers:
                continue
            block_call, results = self._producers[tensor], tree_tensors(result)
            if func.__name__ == "__getitem__" and len(results) == 1 and is_full_view(results[0], tensor):
                self._producers[results[0]] = block_call
            elif results or func.__name__ in ("size", "__len__") or func == SHAPE_ATTRIBUTE.__get__:
                self._read_by_glue.add(block_call)

    def _note_block_op(
        self,
        block_call: _OpenBlockCall,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        operands = tree_tensors((args, kwargs))
        residual = [tensor for tensor in operands if tensor in block_call.residual_tensors]
        if not residual:
            return
        results, name = tree_tensors(result), func.__name__.strip("_")
        if results and results[0] is not residual[0]:
            for frame in self._open_modules:
                frame.used_inputs |= {
                    id(tensor) for tensor in residual if id(tensor) in frame.residual_inputs
                }
        reason = f"reads its values ({name})" if not results and reads_values(name) else ""
        if results:
            reason = self._foreign_param(operands) or tokenwise_problem(
                name, args, kwargs, operands, residual, results[0]
            )
        if reason and not block_call.not_sequence_parallel:
            block_call.not_sequence_parallel = f"{self._open_modules[-1].name} {reason}"
        for tensor in results:
            if tuple(tensor.shape[:2]) == block_call.shape[:2]:
                block_call.residual_tensors[tensor] = True

    def _foreign_param(self, operands: Iterable[torch.Tensor]) -> str:
        """Returns what is wrong with a parameter among `operands`: only gradients of norm parameters are
        summed over ranks.
        """
        frame = self._open_modules[-1]
        for tensor in operands:
            if id(tensor) in self._names and not (
                frame.role == "norm" and any(tensor is p for p in frame.module.parameters())
            ):
                return f"uses {self._names[id(tensor)]} on it"
        return ""

    def _before_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._block_call is None and torch.is_grad_enabled():
            arg_of_id = {id(value): arg for arg, value in _arguments(args, kwargs).items()}
            given = {
                id(tensor): tensor for tensor in tree_tensors((args, kwargs)) if tensor in self._producers
            }
            self._pending_inputs = [
                (self._producers[tensor], arg_of_id.get(id(tensor))) for tensor in given.values()
            ]

    def _run_block(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a block call; a block inside another one, or without gradients, is none."""
        if self._block_call is not None or self._pending_inputs is None:
            return forward(*args, **kwargs)
        block_call = self._block_call = _OpenBlockCall(self._block_calls[-1])
        for source, arg in self._pending_inputs:
            self._consumers.setdefault(source, []).append((block_call.name, arg))
        for arg, value in _arguments(args, kwargs).items():
            if (
                not block_call.shape
                and isinstance(value, torch.Tensor)
                and value.ndim == 3
                and value.is_floating_point()
            ):
                block_call.arg, block_call.shape, block_call.input_needs_grad = (
                    arg,
                    tuple(value.shape),
                    value.requires_grad,
                )
                block_call.residual_tensors[value] = True
        self._enter_module(name, block, args, kwargs)
        try:
            outputs = forward(*args, **kwargs)
            self._leave_module(block, args, outputs)
            self._note_flow(block_call, outputs)
        finally:
            self._block_call = None
            self._open_modules.clear()
        return outputs

    def _note_flow(self, block_call: _OpenBlockCall, outputs: Any) -> None:
        """Notes how the stream went through a block call with these outputs."""
        if not block_call.shape:
            return
        output_list = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        residual_indices = [
            i
            for i, each in enumerate(output_list)
            if isinstance(each, torch.Tensor) and each in block_call.residual_tensors
        ]
        if not residual_indices or tuple(output_list[residual_indices[0]].shape) != block_call.shape:
            return
        if sum(each in block_call.residual_tensors for each in tree_tensors(outputs)) > 1:
            block_call.not_sequence_parallel = (
                block_call.not_sequence_parallel or "it returns more than one tensor of the residual stream"
            )
        output_index, (tokens, width) = (
            None if output_list[0] is outputs else residual_indices[0],
            block_call.shape[1:],
        )
        self._flows[block_call.name] = ResidualFlow(
            block_call.name,
            block_call.arg,
            output_index,
            tokens,
            width,
            input_needs_grad=block_call.input_needs_grad,
            not_sequence_parallel=block_call.not_sequence_parallel,
        )

    def _after_block(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        if self._block_call is not None or self._pending_inputs is None:
            return
        self._pending_inputs = None
        residual_flow = self._flows.get(self._block_calls[-1]) if self._block_calls else None
        if residual_flow is not None:
            self._producers[
                outputs if residual_flow.output_index is None else outputs[residual_flow.output_index]
            ] = residual_flow.block_call

    def _enter_module(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        block_call = self._block_call
        if block_call is None:
            return
        taken: dict[int, tuple[int | str, ...]] = {}
        for arg, value in _arguments(args, kwargs).items():
            if isinstance(value, torch.Tensor) and value in block_call.residual_tensors:
                taken[id(value)] = (*taken.get(id(value), ()), arg)
        role = self._roles.get(name, "")
        if role and args:
            mark = ResidualMark(takes_residual=id(args[0]) in taken)
            self.marks[name, block_call.name, block_call.num_calls[name]] = mark
            block_call.num_calls[name] += 1
            if mark.takes_residual and role == "rowwise":
                block_call.not_sequence_parallel = (
                    block_call.not_sequence_parallel or f"{name} takes the residual stream itself"
                )
            if mark.takes_residual and role == "colwise":
                for frame in self._open_modules[1:]:
                    frame.marks += [(id(args[0]), mark)] if id(args[0]) in frame.residual_inputs else []
        self._open_modules.append(_OpenModule(name, module, role, taken))

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends a module inside a block; the outermost module that takes the input of a colwise layer is its
        outer module.
        """
        block_call = self._block_call
        if block_call is None or not self._open_modules or self._open_modules[-1].module is not module:
            return
        frame = self._open_modules.pop()
        output_ids = {id(tensor) for tensor in tree_tensors(output)}
        for tensor, mark in frame.marks:
            if tensor not in frame.used_inputs | output_ids:
                mark.outer_module, mark.outer_args = frame.name, frame.residual_inputs[tensor]
        if (
            frame.role == "rowwise"
            and isinstance(output, torch.Tensor)
            and tuple(output.shape[:2]) == block_call.shape[:2]
        ):
            block_call.residual_tensors[output] = True


def _mark_calls(
    calls: Iterable[LayerCall], marks: Mapping[LayerCallKey, ResidualMark]
) -> tuple[LayerCall, ...]:
    num_before: Counter = Counter()
    flows = []
    for call in calls:
        mark = marks.get((call.name, call.block_call, num_before[call.name, call.block_call]), ResidualMark())
        num_before[call.name, call.block_call] += 1
        flows.append(
            replace(
                call,
                takes_residual=mark.takes_residual,
                outer_module=mark.outer_module,
                outer_args=mark.outer_args,
            )
        )
    return tuple(flows)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    return {**dict(enumerate(args)), **kwargs}
