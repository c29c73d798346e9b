"""How the stream goes through a model: learnt from the trial run, by following it from operation to operation.

The stream is what a block takes in, [rows, tokens, width], and gives out in the same shape. A block can run on a slice of the
tokens when all that it does with the stream treats each token by itself, but for what lies between columns and rows layers:

    x --norm--> h --columns--> (whatever: attention) --rows--> y --add--> x + y
    followed: x h y x+y        not followed: what columns layers give out, which are given all tokens

    by itself     arithmetic element by element, norms over the last dim; whatever else is computed with it is named
    gate          a module round columns layers that takes in h and hands it to no one else: who looks at the shape of h in there
                  expects all tokens, so they are brought together where it begins
    glue          may hand the stream on, and take all of it (`x[:, 0:]`); whatever else it does with it needs all tokens
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

from meshwright.model.blocks.driver import ForwardDriver
from meshwright.model.tensors.op_tables import is_full_view, reads_values, tokenwise_problem
from meshwright.model.tensors.pytree import tree_tensors
from meshwright.plan.model_spec.layer_calls import LayerCall, ResidualFlow

SHAPE_ATTRIBUTE: Any = getattr_static(torch.Tensor, "shape")  # as torch's Python sees it asked for
Blocks = Mapping[str, nn.Module]
OnBlockCall = Callable[[str], None]
LayerCallKey = tuple[str, str, int]  # a layer, a visit, and how many calls of it came before in that


@dataclass
class ResidualMark:
    """Of one call of a layer: whether the stream goes in, and the outermost gate, with the slots where that takes it."""

    takes_residual: bool = False
    outer_module: str = ""
    outer_args: tuple[int | str, ...] = ()


@dataclass
class _OpenModule:
    """A module that runs: the tensors of the stream that it has taken in, by identity, and those that it computes with."""

    name: str
    module: nn.Module
    role: str
    residual_inputs: dict[int, tuple[int | str, ...]]
    used_inputs: set[int] = field(default_factory=set)
    marks: list[tuple[int, ResidualMark]] = field(default_factory=list)


@dataclass
class _OpenBlockCall:
    """A visit that runs: what of it is the stream, where it took that in, and what it does with it but token by token."""

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
    """`calls` with their places in the stream, and its passages through visits, as one `forward` of `module` shows.

    `enter` hears of each visit; `in_place` says that the model writes into what its blocks give out.
    """
    visits: list[str] = []

    def reach(visit: str) -> None:
        visits.append(visit)
        on_block_call(visit)

    streaming = _ResidualTrace(module, blocks, {call.name: call.role for call in calls}, visits)
    drive = ForwardDriver(blocks, in_place=writes_in_place)
    on_block_call("")
    try:
        with streaming:
            outputs, _, _ = drive.forward(reach, run_forward)
    finally:
        drive.detach()
        streaming.detach()
    return _mark_calls(calls, streaming.marks), streaming.residual_flows(outputs)


class _ResidualTrace(TorchFunctionMode):
    """What a forward does with the stream. `roles` are those of layers, `visits` are filled from outside, in order."""

    def __init__(
        self, module: nn.Module, blocks: Blocks, roles: Mapping[str, str], visits: Sequence[str]
    ) -> None:
        super().__init__()
        self.marks: dict[LayerCallKey, ResidualMark] = {}
        self._roles, self._block_calls = roles, visits
        self._flows: dict[str, ResidualFlow] = {}
        self._producers: WeakIdKeyDictionary = (
            WeakIdKeyDictionary()
        )  # what visits gave out, as glue has it: the visit
        self._consumers: dict[str, list[tuple[str, int | str | None]]] = {}
        self._read_by_glue: set[str] = set()
        self._pending_inputs: list[tuple[str, int | str | None]] | None = (
            None  # of the block that is called: what of others goes in, where
        )
        self._block_call: _OpenBlockCall | None = None
        self._open_modules: list[_OpenModule] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._attach(module, blocks)

    def _attach(self, module: nn.Module, blocks: Blocks) -> None:
        inside = {id(part) for block in blocks.values() for part in block.modules()} - {
            id(block) for block in blocks.values()
        }
        for name, part in module.named_modules():
            if id(part) in inside:
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
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for block, own in self._replaced:
            block.__dict__.pop("forward", None)
            if own is not None:
                block.__dict__["forward"] = own

    def residual_flows(self, outputs: Any) -> tuple[ResidualFlow, ...]:
        """The passages of the stream in a forward that has ended with `outputs`."""
        self._read_by_glue |= {
            self._producers[tensor] for tensor in tree_tensors(outputs) if tensor in self._producers
        }
        found = dict(self._flows)
        for visit, takers in self._consumers.items():
            if visit in self._read_by_glue or visit not in found or len(takers) != 1:
                continue
            (taker, slot) = takers[0]
            if taker in found and found[taker].arg == slot:
                found[taker] = replace(found[taker], producer=visit)
            elif taker in found or slot is None:  # it takes it in, but not as its stream
                continue
            found[visit] = replace(found[visit], consumer=taker)
        return tuple(found.values())

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
        """Glue computes something."""
        for tensor in tree_tensors(given):
            if tensor not in self._producers:
                continue
            visit, made = self._producers[tensor], tree_tensors(result)
            if func.__name__ == "__getitem__" and len(made) == 1 and is_full_view(made[0], tensor):
                self._producers[made[0]] = visit
            elif made or func.__name__ in ("size", "__len__") or func == SHAPE_ATTRIBUTE.__get__:
                self._read_by_glue.add(visit)

    def _note_block_op(
        self, visit: _OpenBlockCall, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """A block computes something."""
        operands = tree_tensors((args, kwargs))
        carried = [tensor for tensor in operands if tensor in visit.residual_tensors]
        if not carried:
            return
        made, name = tree_tensors(result), func.__name__.strip("_")
        if made and made[0] is not carried[0]:
            for frame in self._open_modules:
                frame.used_inputs |= {id(tensor) for tensor in carried if id(tensor) in frame.residual_inputs}
        why = f"reads its values ({name})" if not made and reads_values(name) else ""
        if made:
            why = self._foreign_param(operands) or tokenwise_problem(
                name, args, kwargs, operands, carried, made[0]
            )
        if why and not visit.not_sequence_parallel:
            visit.not_sequence_parallel = f"{self._open_modules[-1].name} {why}"
        for tensor in made:
            if tuple(tensor.shape[:2]) == visit.shape[:2]:
                visit.residual_tensors[tensor] = True

    def _foreign_param(self, operands: Iterable[torch.Tensor]) -> str:
        """What is wrong with a parameter among `operands`: but for those of a norm, nobody adds up their gradients."""
        frame = self._open_modules[-1]
        for tensor in operands:
            if id(tensor) in self._names and not (
                frame.role == "norm" and any(tensor is p for p in frame.module.parameters())
            ):
                return f"uses {self._names[id(tensor)]} on it"
        return ""

    def _before_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is about to be reached, with what glue has."""
        if self._block_call is None and torch.is_grad_enabled():
            top = {id(value): slot for slot, value in _arguments(args, kwargs).items()}
            given = {
                id(tensor): tensor for tensor in tree_tensors((args, kwargs)) if tensor in self._producers
            }
            self._pending_inputs = [
                (self._producers[tensor], top.get(id(tensor))) for tensor in given.values()
            ]

    def _run_block(
        self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """A block runs; within another one, or without gradients, it is no visit."""
        if self._block_call is not None or self._pending_inputs is None:
            return forward(*args, **kwargs)
        visit = self._block_call = _OpenBlockCall(self._block_calls[-1])
        for source, slot in self._pending_inputs:
            self._consumers.setdefault(source, []).append((visit.name, slot))
        for slot, value in _arguments(args, kwargs).items():
            if (
                not visit.shape
                and isinstance(value, torch.Tensor)
                and value.ndim == 3
                and value.is_floating_point()
            ):
                visit.arg, visit.shape, visit.input_needs_grad = slot, tuple(value.shape), value.requires_grad
                visit.residual_tensors[value] = True
        self._enter_module(name, block, args, kwargs)
        try:
            outputs = forward(*args, **kwargs)
            self._leave_module(block, args, outputs)
            self._note_flow(visit, outputs)
        finally:
            self._block_call = None
            self._open_modules.clear()
        return outputs

    def _note_flow(self, visit: _OpenBlockCall, outputs: Any) -> None:
        """Note how the stream went through a visit that gives out `outputs`."""
        if not visit.shape:
            return
        several = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        through = [
            i
            for i, each in enumerate(several)
            if isinstance(each, torch.Tensor) and each in visit.residual_tensors
        ]
        if not through or tuple(several[through[0]].shape) != visit.shape:
            return
        if sum(each in visit.residual_tensors for each in tree_tensors(outputs)) > 1:
            visit.not_sequence_parallel = (
                visit.not_sequence_parallel or "it gives out more than one tensor of the stream"
            )
        place, (tokens, width) = None if several[0] is outputs else through[0], visit.shape[1:]
        self._flows[visit.name] = ResidualFlow(
            visit.name,
            visit.arg,
            place,
            tokens,
            width,
            input_needs_grad=visit.input_needs_grad,
            not_sequence_parallel=visit.not_sequence_parallel,
        )

    def _after_block(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """A block has been left: `outputs` are what glue gets."""
        if self._block_call is not None or self._pending_inputs is None:
            return
        self._pending_inputs = None
        passage = self._flows.get(self._block_calls[-1]) if self._block_calls else None
        if passage is not None:
            self._producers[outputs if passage.output_index is None else outputs[passage.output_index]] = (
                passage.block_call
            )

    def _enter_module(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module within a block is called."""
        visit = self._block_call
        if visit is None:
            return
        taken: dict[int, tuple[int | str, ...]] = {}
        for slot, value in _arguments(args, kwargs).items():
            if isinstance(value, torch.Tensor) and value in visit.residual_tensors:
                taken[id(value)] = (*taken.get(id(value), ()), slot)
        role = self._roles.get(name, "")
        if role and args:
            mark = ResidualMark(takes_residual=id(args[0]) in taken)
            self.marks[name, visit.name, visit.num_calls[name]] = mark
            visit.num_calls[name] += 1
            if mark.takes_residual and role == "rowwise":
                visit.not_sequence_parallel = (
                    visit.not_sequence_parallel or f"{name} takes in the stream itself"
                )
            if mark.takes_residual and role == "colwise":
                for frame in self._open_modules[1:]:
                    frame.marks += [(id(args[0]), mark)] if id(args[0]) in frame.residual_inputs else []
        self._open_modules.append(_OpenModule(name, module, role, taken))

    def _leave_module(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module within a block has been left; of those that take in what columns layers do, the outermost is their gate."""
        visit = self._block_call
        if visit is None or not self._open_modules or self._open_modules[-1].module is not module:
            return
        frame = self._open_modules.pop()
        handed_on = {id(tensor) for tensor in tree_tensors(output)}
        for tensor, mark in frame.marks:
            if tensor not in frame.used_inputs | handed_on:
                mark.outer_module, mark.outer_args = frame.name, frame.residual_inputs[tensor]
        if (
            frame.role == "rowwise"
            and isinstance(output, torch.Tensor)
            and tuple(output.shape[:2]) == visit.shape[:2]
        ):
            visit.residual_tensors[output] = True


def _mark_calls(
    calls: Iterable[LayerCall], marks: Mapping[LayerCallKey, ResidualMark]
) -> tuple[LayerCall, ...]:
    """`calls`, each with what is known of its place in the stream."""
    before: Counter = Counter()
    found = []
    for call in calls:
        mark = marks.get((call.name, call.block_call, before[call.name, call.block_call]), ResidualMark())
        before[call.name, call.block_call] += 1
        found.append(
            replace(
                call,
                takes_residual=mark.takes_residual,
                outer_module=mark.outer_module,
                outer_args=mark.outer_args,
            )
        )
    return tuple(found)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    return {**dict(enumerate(args)), **kwargs}
