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

from meshwright.model.blocks.driver import Drive
from meshwright.model.tensors.op_tables import all_of, alone, reads
from meshwright.model.tensors.pytree import tensors
from meshwright.plan.model_spec.layer_calls import Call, Passage

LENGTHS: Any = getattr_static(torch.Tensor, "shape")  # as torch's Python sees it asked for
Blocks = Mapping[str, nn.Module]
Enter = Callable[[str], None]
Key = tuple[str, str, int]  # a layer, a visit, and how many calls of it came before in that


@dataclass
class Mark:
    """Of one call of a layer: whether the stream goes in, and the outermost gate, with the slots where that takes it."""

    streams: bool = False
    gate: str = ""
    slots: tuple[int | str, ...] = ()


@dataclass
class _Frame:
    """A module that runs: the tensors of the stream that it has taken in, by identity, and those that it computes with."""

    name: str
    module: nn.Module
    role: str
    taken: dict[int, tuple[int | str, ...]]
    used: set[int] = field(default_factory=set)
    marks: list[tuple[int, Mark]] = field(default_factory=list)


@dataclass
class _Visit:
    """A visit that runs: what of it is the stream, where it took that in, and what it does with it but token by token."""

    name: str
    slot: int | str = ""
    shape: tuple[int, ...] = ()
    needed: bool = True
    mixes: str = ""
    carried: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    calls: Counter = field(default_factory=Counter)


def followed(
    module: nn.Module, blocks: Blocks, calls: tuple[Call, ...], enter: Enter, forward: Callable[[], Any], *, in_place: bool
) -> tuple[tuple[Call, ...], tuple[Passage, ...]]:
    """`calls` with their places in the stream, and its passages through visits, as one `forward` of `module` shows.

    `enter` hears of each visit; `in_place` says that the model writes into what its blocks give out.
    """
    visits: list[str] = []

    def reach(visit: str) -> None:
        visits.append(visit)
        enter(visit)

    streaming = _Streaming(module, blocks, {call.name: call.role for call in calls}, visits)
    drive = Drive(blocks, in_place=in_place)
    enter("")
    try:
        with streaming:
            outputs, _, _ = drive.forward(reach, forward)
    finally:
        drive.detach()
        streaming.detach()
    return _marked(calls, streaming.marks), streaming.passages(outputs)


class _Streaming(TorchFunctionMode):
    """What a forward does with the stream. `roles` are those of layers, `visits` are filled from outside, in order."""

    def __init__(self, module: nn.Module, blocks: Blocks, roles: Mapping[str, str], visits: Sequence[str]) -> None:
        super().__init__()
        self.marks: dict[Key, Mark] = {}
        self._roles, self._visits = roles, visits
        self._passages: dict[str, Passage] = {}
        self._given: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what visits gave out, as glue has it: the visit
        self._takers: dict[str, list[tuple[str, int | str | None]]] = {}
        self._looked_at: set[str] = set()
        self._taking: list[tuple[str, int | str | None]] | None = (
            None  # of the block that is called: what of others goes in, where
        )
        self._visit: _Visit | None = None
        self._frames: list[_Frame] = []
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._handles: list[RemovableHandle] = []
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._hook(module, blocks)

    def _hook(self, module: nn.Module, blocks: Blocks) -> None:
        inside = {id(part) for block in blocks.values() for part in block.modules()} - {id(block) for block in blocks.values()}
        for name, part in module.named_modules():
            if id(part) in inside:
                self._handles.append(part.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                self._handles.append(part.register_forward_hook(self._leave))
        for name, block in blocks.items():
            self._handles.append(block.register_forward_pre_hook(self._called, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._returned))
            self._replaced.append((block, block.__dict__.get("forward")))
            block.forward = partial(self._run, name, block, block.forward)

    def detach(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()
        for block, own in self._replaced:
            block.__dict__.pop("forward", None)
            if own is not None:
                block.__dict__["forward"] = own

    def passages(self, outputs: Any) -> tuple[Passage, ...]:
        """The passages of the stream in a forward that has ended with `outputs`."""
        self._looked_at |= {self._given[tensor] for tensor in tensors(outputs) if tensor in self._given}
        found = dict(self._passages)
        for visit, takers in self._takers.items():
            if visit in self._looked_at or visit not in found or len(takers) != 1:
                continue
            (taker, slot) = takers[0]
            if taker in found and found[taker].slot == slot:
                found[taker] = replace(found[taker], source=visit)
            elif taker in found or slot is None:  # it takes it in, but not as its stream
                continue
            found[visit] = replace(found[visit], onward=taker)
        return tuple(found.values())

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._visit is None:
            if self._taking is None:
                self._between(func, (args, kwargs), result)
        elif not any(frame.role in ("columns", "rows", "head") for frame in self._frames):
            self._within(self._visit, func, args, kwargs, result)
        return result

    def _between(self, func: Any, given: Any, result: Any) -> None:
        """Glue computes something."""
        for tensor in tensors(given):
            if tensor not in self._given:
                continue
            visit, made = self._given[tensor], tensors(result)
            if func.__name__ == "__getitem__" and len(made) == 1 and all_of(made[0], tensor):
                self._given[made[0]] = visit
            elif made or func.__name__ in ("size", "__len__") or func == LENGTHS.__get__:
                self._looked_at.add(visit)

    def _within(self, visit: _Visit, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A block computes something."""
        operands = tensors((args, kwargs))
        carried = [tensor for tensor in operands if tensor in visit.carried]
        if not carried:
            return
        made, name = tensors(result), func.__name__.strip("_")
        if made and made[0] is not carried[0]:
            for frame in self._frames:
                frame.used |= {id(tensor) for tensor in carried if id(tensor) in frame.taken}
        why = f"reads its values ({name})" if not made and reads(name) else ""
        if made:
            why = self._foreign(operands) or alone(name, args, kwargs, operands, carried, made[0])
        if why and not visit.mixes:
            visit.mixes = f"{self._frames[-1].name} {why}"
        for tensor in made:
            if tuple(tensor.shape[:2]) == visit.shape[:2]:
                visit.carried[tensor] = True

    def _foreign(self, operands: Iterable[torch.Tensor]) -> str:
        """What is wrong with a parameter among `operands`: but for those of a norm, nobody adds up their gradients."""
        frame = self._frames[-1]
        for tensor in operands:
            if id(tensor) in self._names and not (frame.role == "norm" and any(tensor is p for p in frame.module.parameters())):
                return f"uses {self._names[id(tensor)]} on it"
        return ""

    def _called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A block is about to be reached, with what glue has."""
        if self._visit is None and torch.is_grad_enabled():
            top = {id(value): slot for slot, value in _slots(args, kwargs).items()}
            given = {id(tensor): tensor for tensor in tensors((args, kwargs)) if tensor in self._given}
            self._taking = [(self._given[tensor], top.get(id(tensor))) for tensor in given.values()]

    def _run(self, name: str, block: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A block runs; within another one, or without gradients, it is no visit."""
        if self._visit is not None or self._taking is None:
            return forward(*args, **kwargs)
        visit = self._visit = _Visit(self._visits[-1])
        for source, slot in self._taking:
            self._takers.setdefault(source, []).append((visit.name, slot))
        for slot, value in _slots(args, kwargs).items():
            if not visit.shape and isinstance(value, torch.Tensor) and value.ndim == 3 and value.is_floating_point():
                visit.slot, visit.shape, visit.needed = slot, tuple(value.shape), value.requires_grad
                visit.carried[value] = True
        self._enter(name, block, args, kwargs)
        try:
            outputs = forward(*args, **kwargs)
            self._leave(block, args, outputs)
            self._closed(visit, outputs)
        finally:
            self._visit = None
            self._frames.clear()
        return outputs

    def _closed(self, visit: _Visit, outputs: Any) -> None:
        """Note how the stream went through a visit that gives out `outputs`."""
        if not visit.shape:
            return
        several = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        through = [i for i, each in enumerate(several) if isinstance(each, torch.Tensor) and each in visit.carried]
        if not through or tuple(several[through[0]].shape) != visit.shape:
            return
        if sum(each in visit.carried for each in tensors(outputs)) > 1:
            visit.mixes = visit.mixes or "it gives out more than one tensor of the stream"
        place, (tokens, width) = None if several[0] is outputs else through[0], visit.shape[1:]
        self._passages[visit.name] = Passage(visit.name, visit.slot, place, tokens, width, needed=visit.needed, mixes=visit.mixes)

    def _returned(self, block: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """A block has been left: `outputs` are what glue gets."""
        if self._visit is not None or self._taking is None:
            return
        self._taking = None
        passage = self._passages.get(self._visits[-1]) if self._visits else None
        if passage is not None:
            self._given[outputs if passage.place is None else outputs[passage.place]] = passage.visit

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module within a block is called."""
        visit = self._visit
        if visit is None:
            return
        taken: dict[int, tuple[int | str, ...]] = {}
        for slot, value in _slots(args, kwargs).items():
            if isinstance(value, torch.Tensor) and value in visit.carried:
                taken[id(value)] = (*taken.get(id(value), ()), slot)
        role = self._roles.get(name, "")
        if role and args:
            mark = Mark(streams=id(args[0]) in taken)
            self.marks[name, visit.name, visit.calls[name]] = mark
            visit.calls[name] += 1
            if mark.streams and role == "rows":
                visit.mixes = visit.mixes or f"{name} takes in the stream itself"
            if mark.streams and role == "columns":
                for frame in self._frames[1:]:
                    frame.marks += [(id(args[0]), mark)] if id(args[0]) in frame.taken else []
        self._frames.append(_Frame(name, module, role, taken))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module within a block has been left; of those that take in what columns layers do, the outermost is their gate."""
        visit = self._visit
        if visit is None or not self._frames or self._frames[-1].module is not module:
            return
        frame = self._frames.pop()
        handed_on = {id(tensor) for tensor in tensors(output)}
        for tensor, mark in frame.marks:
            if tensor not in frame.used | handed_on:
                mark.gate, mark.slots = frame.name, frame.taken[tensor]
        if frame.role == "rows" and isinstance(output, torch.Tensor) and tuple(output.shape[:2]) == visit.shape[:2]:
            visit.carried[output] = True


def _marked(calls: Iterable[Call], marks: Mapping[Key, Mark]) -> tuple[Call, ...]:
    """`calls`, each with what is known of its place in the stream."""
    before: Counter = Counter()
    found = []
    for call in calls:
        mark = marks.get((call.name, call.visit, before[call.name, call.visit]), Mark())
        before[call.name, call.visit] += 1
        found.append(replace(call, streams=mark.streams, gate=mark.gate, slots=mark.slots))
    return tuple(found)


def _slots(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    return {**dict(enumerate(args)), **kwargs}
