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

from meshwright.model.tensors.function_modes import (
    SHAPE_ONLY_FACTORIES,
    VALUE_READS,
    ValueReadMode,
    is_constant,
)
from meshwright.model.tensors.placeholder import PlaceholderTensor
from meshwright.model.tensors.pytree import is_dataclass_instance, map_leaves, tree_tensors, value_leaves

FillTemplate = Callable[
    [Sequence[Any]], Any
]  # of what is live, by number, something that was called with it or made of it


class TensorSlot:
    """Where a live tensor stands; no dataclass, because templates look into those."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call, what it is given, and how many tensors it gives: they take the next numbers. `kept`: which of those that are."""

    func: Callable[..., Any]
    args: FillTemplate
    kwargs: FillTemplate
    kept_outputs: tuple[int, ...]
    returns_tensor: bool  # it gives one tensor, and nothing else
    grad_enabled: bool
    function_modes: tuple[TorchFunctionMode, ...] = ()  # modes that the model's forward has entered

    def replay(self, live: Sequence[Any]) -> Any:
        """What it gives."""
        if self.grad_enabled and not self.function_modes:
            return self.func(*self.args(live), **self.kwargs(live))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for mode in self.function_modes:
                stack.enter_context(mode)
            return self.func(*self.args(live), **self.kwargs(live))


@dataclass(frozen=True)
class ReplayScript:
    """What a part has called; `result` is what its run left: the values that it gives, or the outputs of the model."""

    calls: tuple[ScriptCall, ...]
    fill_result: FillTemplate
    constants: tuple[tuple[torch.Tensor, int], ...]  # each with its version
    skipped_blocks: tuple[str, ...] = ()  # calls of its blocks before it begins, which are not made

    @property
    def is_valid(self) -> bool:
        """Whether nobody has written into what it holds."""
        return all(tensor._version == version for tensor, version in self.constants)

    def replay(self, inputs: Iterable[torch.Tensor]) -> Any:
        """What the part makes of `seeds`: what it has received, and the inputs, in the order in which they were written down."""
        live: list[Any] = list(inputs)
        for line in self.calls:
            made = line.replay(live)
            if line.returns_tensor:
                live.append(made)
            elif line.kept_outputs:
                found = tree_tensors(made)
                live += [found[number] for number in line.kept_outputs]
        return self.fill_result(live)


def compile_template(template: Any) -> FillTemplate:
    """What puts live tensors into `template`; lists and dicts are new each time."""
    if isinstance(template, TensorSlot):
        number = template.index
        return lambda live: live[number]
    if type(template) is tuple:
        makes = [compile_template(item) for item in template]
        return lambda live: tuple([make(live) for make in makes])
    if type(template) is dict:
        rest = [(key, compile_template(item)) for key, item in template.items() if not _is_fixed(item)]
        fixed = template | dict.fromkeys(key for key, _ in rest)
        return lambda live: fixed | {key: make(live) for key, make in rest}  # in the order of `fixed`
    if _is_fixed(template):
        return lambda live: template
    return lambda live: map_leaves(
        template, lambda leaf: live[leaf.index] if isinstance(leaf, TensorSlot) else leaf
    )


def _is_fixed(template: Any) -> bool:
    """Whether it is the same each time, and nobody can write into it."""
    if isinstance(template, tuple):
        return all(map(_is_fixed, template))
    return not (isinstance(template, (TensorSlot, list, dict)) or is_dataclass_instance(template))


AUTOCAST_DEVICES = ("cpu", "cuda")
CONSTANT_TYPES = (slice, type(Ellipsis), torch.memory_format, torch.layout)


class ScriptRecorder:
    """Writes a script during a run of a part; `why` tells what spoils it.

    `known` are tensors that outlast a step, by id. `closely`: what blocks compute with is looked at.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        known_tensors: Mapping[int, torch.Tensor],
        inputs: Iterable[torch.Tensor],
        *,
        check_blocks: bool,
    ) -> None:
        self.failure_reason = ""
        self._blocks, self._known_tensors, self._check_blocks = blocks, known_tensors, check_blocks
        inputs = tuple(inputs)
        self._live = {id(tensor): (number, tensor) for number, tensor in enumerate(inputs)}
        self._count = len(inputs)
        self._constants_made: dict[int, torch.Tensor] = {}  # what glue has made that is not live
        self._calls: list[ScriptCall] = []
        self._skipped_blocks: list[str] = []
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}
        self._context = _context()
        if len(self._live) < len(inputs):
            self.fail("one tensor came as two")

    def skip_block(self, name: str) -> None:
        """A call of the block `name` is not made."""
        self._skipped_blocks.append(name)

    def run_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Glue calls `func`, on tensors that have numbers."""
        given = tree_tensors((args, kwargs))
        live = [tensor for tensor in given if id(tensor) in self._live or tensor.requires_grad]
        if self.failure_reason:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in given]
        by_shape = (
            func.__name__ in SHAPE_ONLY_FACTORIES and len(given) == 1
        )  # not filled with the numbers of another
        if not live or by_shape:
            outcome = func(*args, **kwargs)
            if by_shape or all(self._is_known(tensor) for tensor in given):
                self._constants_made |= {
                    id(tensor): tensor
                    for tensor in tree_tensors(outcome)
                    if id(tensor) not in self._known_tensors
                }
            self._check_not_written(func, given, versions, self._constants_made)
            return outcome
        outcome = self._call_without_reads(func, args, kwargs)
        if not tree_tensors(outcome) and outcome is not None and all(map(is_constant, value_leaves(outcome))):
            return outcome
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in live):
            self.fail(f"{func.__name__} is called without gradients on what needs one")
        if _autocast_dtypes() != self._context[: len(AUTOCAST_DEVICES)]:
            self.fail(f"{func.__name__} is called in a context of its own")
        self._check_not_written(func, given, versions, self._live)
        self._add_call(func, args, kwargs, outcome)
        return outcome

    def _call_without_reads(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outcome of `func`, which must not read a number."""
        if func.__name__ == "__get__":
            return func(*args, **kwargs)
        with ValueReadMode() as watch:
            outcome = func(*args, **kwargs)
        if watch.reads_values or func.__name__ in VALUE_READS:
            self.fail(f"glue reads a number ({func.__name__})")
        return outcome

    def run_block(
        self,
        name: str,
        run: Callable[..., Any],
        get_captured: Callable[[], Sequence[Any]],
        function_modes: tuple[TorchFunctionMode, ...],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The block `name` runs itself: `run(*args, **kwargs)`; `captured()` is what was captured in it, in modes `around` it."""
        block, given = self._blocks.get(name), tree_tensors((args, kwargs))
        with self._block_check(given):
            outputs = run(*args, **kwargs)
        if self.failure_reason:
            return outputs
        if block is None or block._forward_pre_hooks or block._forward_hooks or get_captured():
            self.fail(f"'{name}' has hooks, or something is captured in it")
        elif _context() != self._context:
            self.fail(f"'{name}' is called in a context of its own")
        elif [id(tensor) for tensor in tree_tensors((args, kwargs))] != [id(tensor) for tensor in given]:
            self.fail(f"'{name}' writes into a list or dict that it is given")
        else:
            self._add_call(block, args, kwargs, outputs, function_modes)
        return outputs

    def finish(self, result: Any) -> ReplayScript | None:
        """The script of the run that has left `result`; None where it could not be written."""
        made = self._compile(result, result=True)
        called = {id(line.func) for line in self._calls}
        skipped = tuple(name for name in self._skipped_blocks if id(self._blocks[name]) in called)
        self._live, self._constants_made = {}, {}
        return (
            None
            if self.failure_reason
            else ReplayScript(tuple(self._calls), made, tuple(self._constants.values()), skipped)
        )

    def fail(self, reason: str) -> None:
        """Nothing is to be written down, because of `why`."""
        self.failure_reason = self.failure_reason or reason

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known_tensors or id(tensor) in self._constants_made

    def _check_not_written(
        self, func: Any, given: Sequence[torch.Tensor], versions: Sequence[int], free: Mapping[int, object]
    ) -> None:
        """Spoilt where `func` has written into one of `given` that is not among those that are `free` for it."""
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version and id(tensor) not in free:
                self.fail(f"{func.__name__} writes into a tensor that other micro-batches have too")

    def _add_call(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        outcome: Any,
        around: tuple[TorchFunctionMode, ...] = (),
    ) -> None:
        makers = self._compile(args), self._compile(kwargs)
        if any(not (isinstance(leaf, torch.Tensor) or is_constant(leaf)) for leaf in value_leaves(outcome)):
            self.fail(f"a {type(call).__name__} gives out an object")
        kept = []
        for number, tensor in enumerate(tree_tensors(outcome)):
            if id(tensor) not in self._live:
                self._live[id(tensor)] = self._count, tensor
                self._count += 1
                kept.append(number)
        bare = isinstance(outcome, torch.Tensor) and kept == [0]
        self._calls.append(ScriptCall(call, *makers, tuple(kept), bare, torch.is_grad_enabled(), around))

    def _compile(self, value: Any, *, result: bool = False) -> FillTemplate:
        """What makes `value` of what is live then."""
        return compile_template(
            map_leaves(value, self._slot_or_constant if not result else self._result_leaf)
        )

    def _slot_or_constant(self, leaf: Any) -> Any:
        if id(leaf) in self._live:
            return TensorSlot(self._live[id(leaf)][0])
        if not isinstance(leaf, torch.Tensor):
            if not (is_constant(leaf) or isinstance(leaf, CONSTANT_TYPES)):
                self.fail(f"a {type(leaf).__name__} is handed on")
            return leaf
        if not self._is_known(leaf):
            self.fail("nobody knows where a tensor comes from")
        elif isinstance(leaf, nn.Parameter):
            self.fail("glue uses a parameter, of which other micro-batches may have another version")
        else:
            self._constants.setdefault(id(leaf), (leaf, leaf._version))
            if self._constants[id(leaf)][1] != leaf._version:
                self.fail("a tensor is written into between two uses")
        return leaf

    def _result_leaf(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, PlaceholderTensor) else self._slot_or_constant(leaf)

    def _block_check(self, given: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        return (
            _BlockOperandCheck(self, {id(tensor) for tensor in given})
            if self._check_blocks and not self.failure_reason
            else nullcontext()
        )

    def check_block_operands(self, given_ids: set[int], operands: Iterable[torch.Tensor]) -> None:
        """A block computes with `used`; it was `given` tensors with these ids."""
        if any(id(tensor) in self._live and id(tensor) not in given_ids for tensor in operands):
            self.fail("a block takes what it computes with from elsewhere than its arguments")


class _BlockOperandCheck(TorchFunctionMode):
    """Looks at what a block computes with."""

    def __init__(self, writer: ScriptRecorder, given: set[int]) -> None:
        super().__init__()
        self._writer, self._given = writer, given

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._writer.check_block_operands(self._given, tree_tensors((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _context() -> tuple[object, ...]:
    """What a call takes from round it."""
    return (*_autocast_dtypes(), torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())


def _autocast_dtypes() -> tuple[object, ...]:
    """What products are cast to, by device."""
    return tuple(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES
    )


def _module_attributes(modules: Iterable[nn.Module]) -> list[object]:
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


class ScriptCache:
    """The scripts of the parts of one rank, which last for a step; `seeds` of a run are what it has received, and the inputs."""

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._known_tensors = {
            id(tensor): tensor for each in (module.parameters(), module.buffers()) for tensor in each
        }
        inside = {id(each) for block in blocks.values() for each in block.modules()}
        self._glue_modules = [each for each in module.modules() if id(each) not in inside]
        self._attributes_before: list[object] = []  # what those held when a run began
        self._changed_once: set[Hashable] = set()
        self._scripts: dict[Hashable, ReplayScript] = {}
        self._checked: set[Hashable] = set()
        self.failure_reasons: dict[Hashable, str] = {}  # why nothing is written down of a part

    def clear(self) -> None:
        """A step has ended."""
        self._scripts.clear()
        self._attributes_before.clear()

    def find(self, key: Hashable) -> ReplayScript | None:
        """The script of the part `key`, where it has run in this step and nobody has written into what the script holds."""
        script = self._scripts.get(key)
        return script if script is not None and script.is_valid else None

    def start_recording(self, key: Hashable, inputs: Iterable[torch.Tensor]) -> ScriptRecorder | None:
        """What writes down the run of a part that begins; None where that has failed before."""
        if key in self.failure_reasons:
            return None
        self._attributes_before = _module_attributes(self._glue_modules)
        return ScriptRecorder(
            self._blocks, self._known_tensors, inputs, check_blocks=key not in self._checked
        )

    def store(self, key: Hashable, recorder: ScriptRecorder, result: Any) -> None:
        """The run has left `result`."""
        before, now = self._attributes_before, _module_attributes(self._glue_modules)
        self._attributes_before = []
        if len(now) != len(before) or not all(map(is_, now, before)):
            if key not in self._changed_once:  # what is made at the first run and kept is no reason
                self._changed_once.add(key)
                return
            recorder.fail("the forward leaves something behind in the model")
        script = recorder.finish(result)
        if script is None:
            self.failure_reasons[key] = recorder.failure_reason
        else:
            self._scripts[key] = script
            self._checked.add(key)
