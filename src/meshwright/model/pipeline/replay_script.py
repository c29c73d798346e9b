"""Writes the script of a part (model/script.py) while it runs, and finds what keeps others from playing it.

What blocks compute with is looked at closely when a part is written down for the first time in a run, and taken for granted then.

What a run of a part has called, in order: played for the next micro-batch without the model's own forward.

The model's forward makes masks and tables, looks at shapes and goes through blocks that are stubs here; for thin layers that is
as much work as the layers. All of it comes out the same for every micro-batch of a step but for what depends on its numbers. So
the first run of a part in a step is written down, and the others play that:

    the forward     positions = arange(9)     h = embed(ids)     h = layer(h, rotary(positions))     logits = head(h[:, -4:])
    the script                                1 = embed(0)       2 = layer(1, (cos, sin))            3 = 2[:, -4:]   4 = head(3)

*Live* are the inputs, what was received, what blocks give out, parameters, and whatever glue computes with those: numbers in the
script. What glue makes without them is a constant of the step. Nothing is written down of a part, and its forward runs each time,
where that could differ: glue that reads a live number, or makes a tensor whose shape depends on one; that writes into a tensor
which it has not made; that uses one of which nobody knows where it comes from; that casts in a context of its own; an object that
is no tensor and no plain value; blocks with hooks, and what they capture or take from elsewhere than their arguments; a forward
that leaves something behind in the model's attributes, a counter or the last mean (model/writer.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from operator import is_
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.model.tensors.function_modes import BY_SHAPE, READS, Reads, is_plain
from meshwright.model.tensors.placeholder import Foreign
from meshwright.model.tensors.pytree import is_record, leaves, mapped, tensors

Make = Callable[[Sequence[Any]], Any]  # of what is live, by number, something that was called with it or made of it


class Slot:
    """Where a live tensor stands; no dataclass, because templates look into those."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class Line:
    """One call, what it is given, and how many tensors it gives: they take the next numbers. `kept`: which of those that are."""

    call: Callable[..., Any]
    args: Make
    kwargs: Make
    kept: tuple[int, ...]
    bare: bool  # it gives one tensor, and nothing else
    grad: bool
    around: tuple[TorchFunctionMode, ...] = ()  # modes that the model's forward has entered

    def played(self, live: Sequence[Any]) -> Any:
        """What it gives."""
        if self.grad and not self.around:
            return self.call(*self.args(live), **self.kwargs(live))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for mode in self.around:
                stack.enter_context(mode)
            return self.call(*self.args(live), **self.kwargs(live))


@dataclass(frozen=True)
class Script:
    """What a part has called; `result` is what its run left: the values that it gives, or the outputs of the model."""

    lines: tuple[Line, ...]
    result: Make
    constants: tuple[tuple[torch.Tensor, int], ...]  # each with its version
    skipped: tuple[str, ...] = ()  # calls of its blocks before it begins, which are not made

    @property
    def good(self) -> bool:
        """Whether nobody has written into what it holds."""
        return all(tensor._version == version for tensor, version in self.constants)

    def play(self, seeds: Iterable[torch.Tensor]) -> Any:
        """What the part makes of `seeds`: what it has received, and the inputs, in the order in which they were written down."""
        live: list[Any] = list(seeds)
        for line in self.lines:
            made = line.played(live)
            if line.bare:
                live.append(made)
            elif line.kept:
                found = tensors(made)
                live += [found[number] for number in line.kept]
        return self.result(live)


def made(template: Any) -> Make:
    """What puts live tensors into `template`; lists and dicts are new each time."""
    if isinstance(template, Slot):
        number = template.number
        return lambda live: live[number]
    if type(template) is tuple:
        makes = [made(item) for item in template]
        return lambda live: tuple([make(live) for make in makes])
    if type(template) is dict:
        rest = [(key, made(item)) for key, item in template.items() if not _is_fixed(item)]
        fixed = template | dict.fromkeys(key for key, _ in rest)
        return lambda live: fixed | {key: make(live) for key, make in rest}  # in the order of `fixed`
    if _is_fixed(template):
        return lambda live: template
    return lambda live: mapped(template, lambda leaf: live[leaf.number] if isinstance(leaf, Slot) else leaf)


def _is_fixed(template: Any) -> bool:
    """Whether it is the same each time, and nobody can write into it."""
    if isinstance(template, tuple):
        return all(map(_is_fixed, template))
    return not (isinstance(template, (Slot, list, dict)) or is_record(template))


CASTING = ("cpu", "cuda")
PLAIN = (slice, type(Ellipsis), torch.memory_format, torch.layout)


class Writer:
    """Writes a script during a run of a part; `why` tells what spoils it.

    `known` are tensors that outlast a step, by id. `closely`: what blocks compute with is looked at.
    """

    def __init__(
        self, blocks: Mapping[str, nn.Module], known: Mapping[int, torch.Tensor], seeds: Iterable[torch.Tensor], *, closely: bool
    ) -> None:
        self.why = ""
        self._blocks, self._known, self._closely = blocks, known, closely
        seeds = tuple(seeds)
        self._live = {id(tensor): (number, tensor) for number, tensor in enumerate(seeds)}
        self._count = len(seeds)
        self._fresh: dict[int, torch.Tensor] = {}  # what glue has made that is not live
        self._lines: list[Line] = []
        self._skipped: list[str] = []
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}
        self._context = _context()
        if len(self._live) < len(seeds):
            self.spoil("one tensor came as two")

    def skip(self, name: str) -> None:
        """A call of the block `name` is not made."""
        self._skipped.append(name)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Glue calls `func`, on tensors that have numbers."""
        given = tensors((args, kwargs))
        live = [tensor for tensor in given if id(tensor) in self._live or tensor.requires_grad]
        if self.why:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in given]
        by_shape = func.__name__ in BY_SHAPE and len(given) == 1  # not filled with the numbers of another
        if not live or by_shape:
            outcome = func(*args, **kwargs)
            if by_shape or all(self._is_known(tensor) for tensor in given):
                self._fresh |= {id(tensor): tensor for tensor in tensors(outcome) if id(tensor) not in self._known}
            self._unwritten(func, given, versions, self._fresh)
            return outcome
        outcome = self._watched(func, args, kwargs)
        if not tensors(outcome) and outcome is not None and all(map(is_plain, leaves(outcome))):
            return outcome
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in live):
            self.spoil(f"{func.__name__} is called without gradients on what needs one")
        if _casts() != self._context[: len(CASTING)]:
            self.spoil(f"{func.__name__} is called in a context of its own")
        self._unwritten(func, given, versions, self._live)
        self._write(func, args, kwargs, outcome)
        return outcome

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outcome of `func`, which must not read a number."""
        if func.__name__ == "__get__":
            return func(*args, **kwargs)
        with Reads() as watch:
            outcome = func(*args, **kwargs)
        if watch.reads or func.__name__ in READS:
            self.spoil(f"glue reads a number ({func.__name__})")
        return outcome

    def visit(
        self,
        name: str,
        run: Callable[..., Any],
        captured: Callable[[], Sequence[Any]],
        around: tuple[TorchFunctionMode, ...],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The block `name` runs itself: `run(*args, **kwargs)`; `captured()` is what was captured in it, in modes `around` it."""
        block, given = self._blocks.get(name), tensors((args, kwargs))
        with self._within(given):
            outputs = run(*args, **kwargs)
        if self.why:
            return outputs
        if block is None or block._forward_pre_hooks or block._forward_hooks or captured():
            self.spoil(f"'{name}' has hooks, or something is captured in it")
        elif _context() != self._context:
            self.spoil(f"'{name}' is called in a context of its own")
        elif [id(tensor) for tensor in tensors((args, kwargs))] != [id(tensor) for tensor in given]:
            self.spoil(f"'{name}' writes into a list or dict that it is given")
        else:
            self._write(block, args, kwargs, outputs, around)
        return outputs

    def written(self, result: Any) -> Script | None:
        """The script of the run that has left `result`; None where it could not be written."""
        made = self._maker(result, result=True)
        called = {id(line.call) for line in self._lines}
        skipped = tuple(name for name in self._skipped if id(self._blocks[name]) in called)
        self._live, self._fresh = {}, {}
        return None if self.why else Script(tuple(self._lines), made, tuple(self._constants.values()), skipped)

    def spoil(self, why: str) -> None:
        """Nothing is to be written down, because of `why`."""
        self.why = self.why or why

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known or id(tensor) in self._fresh

    def _unwritten(self, func: Any, given: Sequence[torch.Tensor], versions: Sequence[int], free: Mapping[int, object]) -> None:
        """Spoilt where `func` has written into one of `given` that is not among those that are `free` for it."""
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version and id(tensor) not in free:
                self.spoil(f"{func.__name__} writes into a tensor that other micro-batches have too")

    def _write(
        self, call: Callable[..., Any], args: Any, kwargs: Any, outcome: Any, around: tuple[TorchFunctionMode, ...] = ()
    ) -> None:
        makers = self._maker(args), self._maker(kwargs)
        if any(not (isinstance(leaf, torch.Tensor) or is_plain(leaf)) for leaf in leaves(outcome)):
            self.spoil(f"a {type(call).__name__} gives out an object")
        kept = []
        for number, tensor in enumerate(tensors(outcome)):
            if id(tensor) not in self._live:
                self._live[id(tensor)] = self._count, tensor
                self._count += 1
                kept.append(number)
        bare = isinstance(outcome, torch.Tensor) and kept == [0]
        self._lines.append(Line(call, *makers, tuple(kept), bare, torch.is_grad_enabled(), around))

    def _maker(self, value: Any, *, result: bool = False) -> Make:
        """What makes `value` of what is live then."""
        return made(mapped(value, self._slot if not result else self._result))

    def _slot(self, leaf: Any) -> Any:
        if id(leaf) in self._live:
            return Slot(self._live[id(leaf)][0])
        if not isinstance(leaf, torch.Tensor):
            if not (is_plain(leaf) or isinstance(leaf, PLAIN)):
                self.spoil(f"a {type(leaf).__name__} is handed on")
            return leaf
        if not self._is_known(leaf):
            self.spoil("nobody knows where a tensor comes from")
        elif isinstance(leaf, nn.Parameter):
            self.spoil("glue uses a parameter, of which other micro-batches may have another version")
        else:
            self._constants.setdefault(id(leaf), (leaf, leaf._version))
            if self._constants[id(leaf)][1] != leaf._version:
                self.spoil("a tensor is written into between two uses")
        return leaf

    def _result(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, Foreign) else self._slot(leaf)

    def _within(self, given: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        return _Aside(self, {id(tensor) for tensor in given}) if self._closely and not self.why else nullcontext()

    def aside(self, given: set[int], used: Iterable[torch.Tensor]) -> None:
        """A block computes with `used`; it was `given` tensors with these ids."""
        if any(id(tensor) in self._live and id(tensor) not in given for tensor in used):
            self.spoil("a block takes what it computes with from elsewhere than its arguments")


class _Aside(TorchFunctionMode):
    """Looks at what a block computes with."""

    def __init__(self, writer: Writer, given: set[int]) -> None:
        super().__init__()
        self._writer, self._given = writer, given

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._writer.aside(self._given, tensors((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _context() -> tuple[object, ...]:
    """What a call takes from round it."""
    return (*_casts(), torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())


def _casts() -> tuple[object, ...]:
    """What products are cast to, by device."""
    return tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in CASTING)


def _held(modules: Iterable[nn.Module]) -> list[object]:
    """All that modules hold in their attributes, one behind the other; parameters and modules apart."""
    found: list[object] = []
    for module in modules:
        held = [value for key, value in vars(module).items() if key not in ("_parameters", "_modules")]
        found += held
        for value in held:
            kind = type(value)
            if kind is bool or kind is str or kind is NoneType or (kind is OrderedDict and not value):
                continue  # nearly all that a module has: flags, and hooks that there are none of
            if isinstance(value, dict):
                found += value.values()
            elif isinstance(value, (list, set)):
                found += value
    return found


class Scripts:
    """The scripts of the parts of one rank, which last for a step; `seeds` of a run are what it has received, and the inputs."""

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._known = {id(tensor): tensor for each in (module.parameters(), module.buffers()) for tensor in each}
        inside = {id(each) for block in blocks.values() for each in block.modules()}
        self._glue = [each for each in module.modules() if id(each) not in inside]
        self._before: list[object] = []  # what those held when a run began
        self._changed: set[Hashable] = set()
        self._written: dict[Hashable, Script] = {}
        self._proved: set[Hashable] = set()
        self.spoilt: dict[Hashable, str] = {}  # why nothing is written down of a part

    def forget(self) -> None:
        """A step has ended."""
        self._written.clear()
        self._before.clear()

    def find(self, key: Hashable) -> Script | None:
        """The script of the part `key`, where it has run in this step and nobody has written into what the script holds."""
        script = self._written.get(key)
        return script if script is not None and script.good else None

    def writer(self, key: Hashable, seeds: Iterable[torch.Tensor]) -> Writer | None:
        """What writes down the run of a part that begins; None where that has failed before."""
        if key in self.spoilt:
            return None
        self._before = _held(self._glue)
        return Writer(self._blocks, self._known, seeds, closely=key not in self._proved)

    def keep(self, key: Hashable, writer: Writer, result: Any) -> None:
        """The run has left `result`."""
        before, now = self._before, _held(self._glue)
        self._before = []
        if len(now) != len(before) or not all(map(is_, now, before)):
            if key not in self._changed:  # what is made at the first run and kept is no reason
                self._changed.add(key)
                return
            writer.spoil("the forward leaves something behind in the model")
        script = writer.written(result)
        if script is None:
            self.spoilt[key] = writer.why
        else:
            self._written[key] = script
            self._proved.add(key)
