"""Finds the path of the residual stream through a recorded forward, by following it call by call.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.model.recording.forward_recording import (
    BlockEnd,
    BlockStart,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    Recording,
    TensorRecord,
    tensor_records,
)
from meshwright.model.recording.op_table import find_op, reads_values
from meshwright.plan.model_spec.tensor_parallel_layers import LayerCall, ResidualFlow

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
    residual_tensors: set[int] = field(default_factory=set)
    num_calls: Counter = field(default_factory=Counter)


def trace_residual_stream(
    recording: Recording, calls: tuple[LayerCall, ...]
) -> tuple[tuple[LayerCall, ...], tuple[ResidualFlow, ...]]:
    """Returns `calls` with their places in the residual stream of a recorded forward, and its flow through
    block calls.
    """
    trace = _ResidualTrace(recording, {call.name: call.role for call in calls})
    trace.read()
    return _mark_calls(calls, trace.marks), trace.residual_flows()


class _ResidualTrace:
    """Follows the stream through a recorded forward."""

    def __init__(self, recording: Recording, roles: Mapping[str, str]) -> None:
        self.marks: dict[LayerCallKey, ResidualMark] = {}
        self._recording, self._roles = recording, roles
        self._names = recording.parameter_names
        self._flows: dict[str, ResidualFlow] = {}
        # block call that returned a tensor, as glue sees it
        self._producers: dict[int, str] = {}
        self._consumers: dict[str, list[tuple[str, int | str | None]]] = {}
        self._read_by_glue: set[str] = set()
        self._pending_inputs: list[tuple[str, int | str | None]] | None = (
            None  # inputs of the next block call: producer and argument
        )
        self._last_block_call = ""
        self._block_call: _OpenBlockCall | None = None
        self._open_modules: list[_OpenModule] = []

    def read(self) -> None:
        """Follows all events."""
        blocks, inner_modules = frozenset(self._recording.blocks), self._recording.inner_modules
        for event in self._recording.events:
            match event:
                case FunctionCall():
                    self._read_call(event)
                case ModuleStart(name=name):
                    if name in inner_modules:
                        self._enter_module(name, event.args, event.kwargs)
                    elif name in blocks:
                        self._before_block(event)
                case ModuleEnd(name=name):
                    if name in inner_modules:
                        self._leave_module(event)
                    elif name in blocks:
                        self._after_block(event.results)
                case BlockStart():
                    self._start_block(event)
                case BlockEnd():
                    self._end_block(event)

    def residual_flows(self) -> tuple[ResidualFlow, ...]:
        """Returns the flows of the stream."""
        outputs = tensor_records(self._recording.outputs)
        self._read_by_glue |= {self._producers[each.id] for each in outputs if each.id in self._producers}
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

    def _read_call(self, call: FunctionCall) -> None:
        if self._block_call is None:
            if self._pending_inputs is None:
                self._note_glue(call)
        elif not any(frame.role in ("colwise", "rowwise", "lm_head") for frame in self._open_modules):
            self._note_block_op(self._block_call, call)

    def _note_glue(self, call: FunctionCall) -> None:
        for tensor in call.inputs:
            if tensor.id not in self._producers:
                continue
            block_call, results = self._producers[tensor.id], call.outputs
            if call.name == "__getitem__" and len(results) == 1 and results[0].is_full_view(tensor):
                self._producers[results[0].id] = block_call
            elif results or call.name in ("size", "__len__") or call.owner == "shape":
                self._read_by_glue.add(block_call)

    def _note_block_op(self, block_call: _OpenBlockCall, call: FunctionCall) -> None:
        operands = call.inputs
        residual = [tensor for tensor in operands if tensor.id in block_call.residual_tensors]
        if not residual:
            return
        results, name = call.outputs, call.name.strip("_")
        if results and results[0].id != residual[0].id:
            for frame in self._open_modules:
                frame.used_inputs |= {tensor.id for tensor in residual if tensor.id in frame.residual_inputs}
        reason = f"reads its values ({name})" if not results and reads_values(name) else ""
        if results:
            reason = self._foreign_param(operands) or tokenwise_problem(
                name, call.args, call.kwargs, operands, residual, results[0]
            )
        if reason and not block_call.not_sequence_parallel:
            block_call.not_sequence_parallel = f"{self._open_modules[-1].name} {reason}"
        for tensor in results:
            if tuple(tensor.shape[:2]) == block_call.shape[:2]:
                block_call.residual_tensors.add(tensor.id)

    def _foreign_param(self, operands: Iterable[TensorRecord]) -> str:
        """Returns what is wrong with a parameter among `operands`: only gradients of norm parameters are
        summed over ranks.
        """
        frame = self._open_modules[-1]
        for tensor in operands:
            if tensor.id in self._names and not (
                frame.role == "norm" and self._recording.has_parameter(frame.name, tensor)
            ):
                return f"uses {self._names[tensor.id]} on it"
        return ""

    def _before_block(self, event: ModuleStart) -> None:
        if self._block_call is None and event.grad_enabled:
            arg_of_id = {
                value.id: arg
                for arg, value in _arguments(event.args, event.kwargs).items()
                if isinstance(value, TensorRecord)
            }
            inputs = tensor_records((event.args, event.kwargs))
            given = dict.fromkeys(each.id for each in inputs if each.id in self._producers)
            self._pending_inputs = [(self._producers[each], arg_of_id.get(each)) for each in given]

    def _start_block(self, event: BlockStart) -> None:
        self._last_block_call = event.block_call
        if self._block_call is not None or self._pending_inputs is None:
            return
        block_call = self._block_call = _OpenBlockCall(event.block_call)
        for source, arg in self._pending_inputs:
            self._consumers.setdefault(source, []).append((block_call.name, arg))
        for arg, value in _arguments(event.args, event.kwargs).items():
            if (
                not block_call.shape
                and isinstance(value, TensorRecord)
                and value.ndim == 3
                and value.dtype.is_floating_point
            ):
                block_call.arg, block_call.shape, block_call.input_needs_grad = (
                    arg,
                    tuple(value.shape),
                    value.requires_grad,
                )
                block_call.residual_tensors.add(value.id)
        self._enter_module(event.name, event.args, event.kwargs)

    def _end_block(self, event: BlockEnd) -> None:
        block_call = self._block_call
        if block_call is None:
            return
        self._close_module(event.name, event.results)
        self._note_flow(block_call, event.results)
        self._block_call = None
        self._open_modules.clear()

    def _note_flow(self, block_call: _OpenBlockCall, outputs: Any) -> None:
        """Notes how the stream went through a block call with these outputs."""
        if not block_call.shape:
            return
        output_list = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        residual_indices = [
            i
            for i, each in enumerate(output_list)
            if isinstance(each, TensorRecord) and each.id in block_call.residual_tensors
        ]
        if not residual_indices or tuple(output_list[residual_indices[0]].shape) != block_call.shape:
            return
        if sum(each.id in block_call.residual_tensors for each in tensor_records(outputs)) > 1:
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

    def _after_block(self, outputs: Any) -> None:
        if self._block_call is not None or self._pending_inputs is None:
            return
        self._pending_inputs = None
        residual_flow = self._flows.get(self._last_block_call)
        if residual_flow is not None:
            index = residual_flow.output_index
            self._producers[(outputs if index is None else outputs[index]).id] = residual_flow.block_call

    def _enter_module(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        block_call = self._block_call
        if block_call is None:
            return
        taken: dict[int, tuple[int | str, ...]] = {}
        for arg, value in _arguments(args, kwargs).items():
            if isinstance(value, TensorRecord) and value.id in block_call.residual_tensors:
                taken[value.id] = (*taken.get(value.id, ()), arg)
        role = self._roles.get(name, "")
        if role and args:
            first = args[0].id if isinstance(args[0], TensorRecord) else 0
            mark = ResidualMark(takes_residual=first in taken)
            self.marks[name, block_call.name, block_call.num_calls[name]] = mark
            block_call.num_calls[name] += 1
            if mark.takes_residual and role == "rowwise":
                block_call.not_sequence_parallel = (
                    block_call.not_sequence_parallel or f"{name} takes the residual stream itself"
                )
            if mark.takes_residual and role == "colwise":
                for frame in self._open_modules[1:]:
                    frame.marks += [(first, mark)] if first in frame.residual_inputs else []
        self._open_modules.append(_OpenModule(name, role, taken))

    def _leave_module(self, end: ModuleEnd) -> None:
        if self._block_call is not None:
            self._close_module(end.name, end.results)

    def _close_module(self, name: str, output: Any) -> None:
        """Ends a module inside a block; the outermost module that takes the input of a colwise layer is its
        outer module.
        """
        block_call = self._block_call
        if block_call is None or not self._open_modules or self._open_modules[-1].name != name:
            return
        frame = self._open_modules.pop()
        output_ids = {tensor.id for tensor in tensor_records(output)}
        for tensor, mark in frame.marks:
            if tensor not in frame.used_inputs | output_ids:
                mark.outer_module, mark.outer_args = frame.name, frame.residual_inputs[tensor]
        if (
            frame.role == "rowwise"
            and isinstance(output, TensorRecord)
            and tuple(output.shape[:2]) == block_call.shape[:2]
        ):
            block_call.residual_tensors.add(output.id)


def tokenwise_problem(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    operands: Sequence[TensorRecord],
    stream_tensors: Sequence[TensorRecord],
    result: TensorRecord,
) -> str:
    """Returns the reason why the operation `name` does not treat each token by itself; "" if it does.

    `stream_tensors` are those of its `operands` that are the residual stream or computed from it; `result` is
    the tensor that it returns.
    """
    dims = stream_tensors[0].ndim
    op = find_op(name)
    is_first = operands[0].id == stream_tensors[0].id and len(stream_tensors) == 1
    if op.kind == "reduction" and op.is_tokenwise and is_first:
        if op.dims == "trailing":
            return (
                ""
                if len(args[1] if len(args) > 1 else kwargs["normalized_shape"]) < dims - 1
                else f"takes {name} over tokens"
            )
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        over = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
        return (
            "" if dims > 2 and all(each in (-1, dims - 1) for each in over) else f"takes {name} over tokens"
        )
    if op.kind == "reduction" or not op.is_tokenwise:
        return f"computes '{name}' with it"
    if any(tensor.ndim != result.ndim for tensor in stream_tensors):
        return f"computes '{name}' of tensors of different shapes"
    others = [tensor for tensor in operands if not any(tensor.id == each.id for each in stream_tensors)]
    if any(tensor.ndim >= result.ndim - 1 and tensor.shape[1 - result.ndim] != 1 for tensor in others):
        return f"computes '{name}' of it and of a tensor of all tokens"
    return ""


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
