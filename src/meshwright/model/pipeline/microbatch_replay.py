"""Replays the glue and block calls of a stage for the next microbatch, without the model's own forward.

The forward of a model makes masks and tables, reads shapes and passes through the stubs of other stages; for
thin layers that costs as much as the layers. In a step all of it has the same result for every microbatch,
except for what depends on the data. So the first run of a stage in a step is recorded, and the others replay
the record:

    the forward                          the script
    positions = arange(9)
    h = embed(ids)                       1 = embed(0)
    h = layer(h, rotary(positions))      2 = layer(1, (cos, sin))
    logits = head(h[:, -4:])             3 = 2[:, -4:]      4 = head(3)

*Live* tensors have numbers in the script: inputs, received values, block outputs, parameters, and everything
that glue computes from them. What glue makes without them is a constant of the step. A stage is not
recorded, and runs its forward each time, if the results could differ: glue that reads a live value or makes
a tensor whose shape depends on one, that writes into a tensor it has not made, uses a tensor of unknown
origin or runs in its own autocast context; objects that are neither tensors nor constants; blocks with
hooks, side channels or inputs other than their arguments; a forward that changes attributes of the model,
such as a counter. What blocks compute with is checked when a stage is recorded for the first time in a run,
and not again.

Without it every microbatch would run like the first, with placeholders (stage_forward.py), and be as right.
The script stays for its speed on thin layers: without it a step of two ranks with 8 microbatches takes 1.058
times the CPU seconds (95 % interval 1.031 to 1.072; A/A 1.008, 0.994 to 1.031). On layers of width 512 the
gain is not above the noise: 1.011 (1.004 to 1.022) and 0.998 (0.984 to 1.008) under 1F1B, 1.015 (0.999 to
1.024) under GPipe, A/A 0.96 to 1.02. Steps of benchmarks/pipeline/pipeline_vs_torch.py, `toy8` and `large`,
2026-11.
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

from meshwright.device.platforms import DEVICE_TYPES
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.call_description import is_constant
from meshwright.model.tensors.function_modes import (
    InterceptMode,
    ValueReadMode,
)
from meshwright.model.tensors.placeholder import PlaceholderTensor
from meshwright.model.tensors.pytree import is_dataclass_instance, map_leaves, tree_tensors, value_leaves

# live tensors -> arguments or result
FillTemplate = Callable[[Sequence[Any]], Any]


class TensorSlot:
    """The position of a live tensor in a template. It is no dataclass, because the pytree functions look
    into dataclasses.
    """

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call with its arguments.

    Its result tensors take the next numbers; `kept_outputs` are the indices of those that are live.
    """

    func: Callable[..., Any]
    args: FillTemplate
    kwargs: FillTemplate
    kept_outputs: tuple[int, ...]
    returns_tensor: bool  # the result is a single tensor
    grad_enabled: bool
    function_modes: tuple[TorchFunctionMode, ...] = ()  # modes entered by the model's forward

    def replay(self, live: Sequence[Any]) -> Any:
        """Runs the call on live tensors and returns its result."""
        if self.grad_enabled and not self.function_modes:
            return self.func(*self.args(live), **self.kwargs(live))
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
            for mode in self.function_modes:
                stack.enter_context(mode)
            return self.func(*self.args(live), **self.kwargs(live))


@dataclass(frozen=True)
class ReplayScript:
    """The calls of one stage; `fill_result` gives what its run returned: sent values, or the outputs of the
    model.
    """

    calls: tuple[ScriptCall, ...]
    fill_result: FillTemplate
    constants: tuple[tuple[torch.Tensor, int], ...]  # with version counters
    skipped_blocks: tuple[str, ...] = ()  # calls of its blocks in earlier stages

    @property
    def is_valid(self) -> bool:
        """Whether none of the constants has been written into."""
        return all(tensor._version == version for tensor, version in self.constants)

    def replay(self, inputs: Iterable[torch.Tensor]) -> Any:
        """Runs the stage on `inputs`: received values and model inputs, in the order of the recording."""
        live_tensors: list[Any] = list(inputs)
        for call in self.calls:
            result = call.replay(live_tensors)
            if call.returns_tensor:
                live_tensors.append(result)
            elif call.kept_outputs:
                result_tensors = tree_tensors(result)
                live_tensors += [result_tensors[number] for number in call.kept_outputs]
        return self.fill_result(live_tensors)


def compile_template(template: Any) -> FillTemplate:
    """Returns a function that puts live tensors into `template`; lists and dicts are new in each call."""
    if isinstance(template, TensorSlot):
        number = template.index
        return lambda live_tensors: live_tensors[number]
    if type(template) is tuple:
        fill_functions = [compile_template(item) for item in template]
        return lambda live_tensors: tuple([make(live_tensors) for make in fill_functions])
    if type(template) is dict:
        variable_items = [
            (key, compile_template(item)) for key, item in template.items() if not _is_fixed(item)
        ]
        fixed = template | dict.fromkeys(key for key, _ in variable_items)
        # keeps the order of `fixed`
        return lambda live_tensors: fixed | {key: make(live_tensors) for key, make in variable_items}
    if _is_fixed(template):
        return lambda live_tensors: template
    return lambda live_tensors: map_leaves(
        template, lambda leaf: live_tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf
    )


def _is_fixed(template: Any) -> bool:
    if isinstance(template, tuple):
        return all(map(_is_fixed, template))
    return not (isinstance(template, (TensorSlot, list, dict)) or is_dataclass_instance(template))


AUTOCAST_DEVICES = tuple(filter(torch.amp.is_autocast_available, DEVICE_TYPES))
CONSTANT_TYPES = (slice, type(Ellipsis), torch.memory_format, torch.layout)


class ScriptRecorder:
    """Records a script during one run of a stage; `failure_reason` tells why no script can be made.

    `known_tensors` outlast a step, by id. With `check_blocks`, the operands inside blocks are checked.
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
        self._constants_made: dict[int, torch.Tensor] = {}  # made by glue, not live
        self._calls: list[ScriptCall] = []
        self._skipped_blocks: list[str] = []
        self._constants: dict[int, tuple[torch.Tensor, int]] = {}
        self._context = _context()
        if len(self._live) < len(inputs):
            self.fail("two inputs are one tensor")

    def skip_block(self, name: str) -> None:
        """Notes that a call of the block `name` is skipped."""
        self._skipped_blocks.append(name)

    def run_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs the glue function `func` and records it if it has live operands."""
        inputs = tree_tensors((args, kwargs))
        live_tensors = [tensor for tensor in inputs if id(tensor) in self._live or tensor.requires_grad]
        if self.failure_reason:
            return func(*args, **kwargs)
        versions = [tensor._version for tensor in inputs]
        # not from the values of another tensor
        by_shape = find_op(func.__name__).shape_operand == 1 and len(inputs) == 1
        if not live_tensors or by_shape:
            result = func(*args, **kwargs)
            if by_shape or all(self._is_known(tensor) for tensor in inputs):
                self._constants_made |= {
                    id(tensor): tensor
                    for tensor in tree_tensors(result)
                    if id(tensor) not in self._known_tensors
                }
            self._check_not_written(func, inputs, versions, self._constants_made)
            return result
        result = self._call_without_reads(func, args, kwargs)
        if not tree_tensors(result) and result is not None and all(map(is_constant, value_leaves(result))):
            return result
        if not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in live_tensors):
            self.fail(f"{func.__name__} is called without gradients on what needs one")
        if _autocast_dtypes() != self._context[: len(AUTOCAST_DEVICES)]:
            self.fail(f"{func.__name__} is called in a context of its own")
        self._check_not_written(func, inputs, versions, self._live)
        self._add_call(func, args, kwargs, result)
        return result

    def _call_without_reads(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.__name__ == "__get__":
            return func(*args, **kwargs)
        with ValueReadMode() as value_reads:
            result = func(*args, **kwargs)
        if value_reads.reads_values or find_op(func.__name__).kind == "read":
            self.fail(f"glue reads a number ({func.__name__})")
        return result

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
        """Runs the block `name` and records the call.

        `get_captured()` returns what the block put into side channels; `function_modes` are those that the
        model has entered.
        """
        block, inputs = self._blocks.get(name), tree_tensors((args, kwargs))
        with self._block_check(inputs):
            outputs = run(*args, **kwargs)
        if self.failure_reason:
            return outputs
        if block is None or block._forward_pre_hooks or block._forward_hooks or get_captured():
            self.fail(f"'{name}' has hooks, or something is captured in it")
        elif _context() != self._context:
            self.fail(f"'{name}' is called in a context of its own")
        elif [id(tensor) for tensor in tree_tensors((args, kwargs))] != [id(tensor) for tensor in inputs]:
            self.fail(f"'{name}' writes into a list or dict among its inputs")
        else:
            self._add_call(block, args, kwargs, outputs, function_modes)
        return outputs

    def finish(self, result: Any) -> ReplayScript | None:
        """Returns the script of the run that returned `result`; None if it could not be recorded."""
        fill_result = self._compile(result, result=True)
        called_ids = {id(call.func) for call in self._calls}
        skipped = tuple(name for name in self._skipped_blocks if id(self._blocks[name]) in called_ids)
        self._live, self._constants_made = {}, {}
        return (
            None
            if self.failure_reason
            else ReplayScript(tuple(self._calls), fill_result, tuple(self._constants.values()), skipped)
        )

    def fail(self, reason: str) -> None:
        """Gives up recording for this reason."""
        self.failure_reason = self.failure_reason or reason

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._known_tensors or id(tensor) in self._constants_made

    def _check_not_written(
        self, func: Any, inputs: Sequence[torch.Tensor], versions: Sequence[int], free: Mapping[int, object]
    ) -> None:
        """Fails if `func` has written into an input that is not in `free`."""
        for tensor, version in zip(inputs, versions, strict=True):
            if tensor._version != version and id(tensor) not in free:
                self.fail(f"{func.__name__} writes into a tensor that other microbatches use too")

    def _add_call(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        around: tuple[TorchFunctionMode, ...] = (),
    ) -> None:
        fill_functions = self._compile(args), self._compile(kwargs)
        if any(not (isinstance(leaf, torch.Tensor) or is_constant(leaf)) for leaf in value_leaves(result)):
            self.fail(f"a {type(call).__name__} returns an object")
        kept = []
        for number, tensor in enumerate(tree_tensors(result)):
            if id(tensor) not in self._live:
                self._live[id(tensor)] = self._count, tensor
                self._count += 1
                kept.append(number)
        bare = isinstance(result, torch.Tensor) and kept == [0]
        self._calls.append(
            ScriptCall(call, *fill_functions, tuple(kept), bare, torch.is_grad_enabled(), around)
        )

    def _compile(self, value: Any, *, result: bool = False) -> FillTemplate:
        return compile_template(
            map_leaves(value, self._slot_or_constant if not result else self._result_leaf)
        )

    def _slot_or_constant(self, leaf: Any) -> Any:
        if id(leaf) in self._live:
            return TensorSlot(self._live[id(leaf)][0])
        if not isinstance(leaf, torch.Tensor):
            if not (is_constant(leaf) or isinstance(leaf, CONSTANT_TYPES)):
                self.fail(f"a {type(leaf).__name__} is passed on")
            return leaf
        if not self._is_known(leaf):
            self.fail("a tensor has an unknown origin")
        elif isinstance(leaf, nn.Parameter):
            self.fail("glue uses a parameter, of which other microbatches may use another version")
        else:
            self._constants.setdefault(id(leaf), (leaf, leaf._version))
            if self._constants[id(leaf)][1] != leaf._version:
                self.fail("a tensor is written into between two uses")
        return leaf

    def _result_leaf(self, leaf: Any) -> Any:
        return leaf if isinstance(leaf, PlaceholderTensor) else self._slot_or_constant(leaf)

    def _block_check(self, inputs: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Fails if a block computes with live tensors that are not among its `inputs`."""
        if not self._check_blocks or self.failure_reason:
            return nullcontext()
        given_ids = {id(tensor) for tensor in inputs}

        def check(func: Any, args: Any, kwargs: Any) -> Any:
            operand_ids = {id(tensor) for tensor in tree_tensors((args, kwargs))} - given_ids
            if not operand_ids.isdisjoint(self._live):
                self.fail("a block computes with tensors that are not among its arguments")
            return func(*args, **kwargs)

        return InterceptMode(check)


def _context() -> tuple[object, ...]:
    return (*_autocast_dtypes(), torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack())


def _autocast_dtypes() -> tuple[object, ...]:
    return tuple(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in AUTOCAST_DEVICES
    )


def _module_attributes(modules: Iterable[nn.Module]) -> list[object]:
    """All attribute values of the modules, except parameters and submodules."""
    values: list[object] = []
    for module in modules:
        attributes = [value for key, value in vars(module).items() if key not in ("_parameters", "_modules")]
        values += attributes
        for value in attributes:
            value_type = type(value)
            if (
                value_type is bool
                or value_type is str
                or value_type is NoneType
                or (value_type is OrderedDict and not value)
            ):
                continue  # fast path: flags and empty hook dicts
            if isinstance(value, dict):
                values += value.values()
            elif isinstance(value, (list, set)):
                values += value
    return values


class ScriptCache:
    """The scripts of the stages of one rank, valid for one step."""

    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._blocks = blocks
        self._known_tensors = {
            id(tensor): tensor for each in (module.parameters(), module.buffers()) for tensor in each
        }
        inside = {id(each) for block in blocks.values() for each in block.modules()}
        self._glue_modules = [each for each in module.modules() if id(each) not in inside]
        self._attributes_before: list[object] = []  # attributes at the start of a run
        self._changed_once: set[Hashable] = set()
        self._scripts: dict[Hashable, ReplayScript] = {}
        self._checked: set[Hashable] = set()
        self.failure_reasons: dict[Hashable, str] = {}  # reasons by stage

    def clear(self) -> None:
        """Drops all scripts at the end of a step."""
        self._scripts.clear()
        self._attributes_before.clear()

    def find(self, key: Hashable) -> ReplayScript | None:
        """Returns the script of the stage `key`, if it was recorded in this step and is still valid."""
        script = self._scripts.get(key)
        return script if script is not None and script.is_valid else None

    def start_recording(self, key: Hashable, inputs: Iterable[torch.Tensor]) -> ScriptRecorder | None:
        """Returns a recorder for the next run of a stage; None if recording it has failed before."""
        if key in self.failure_reasons:
            return None
        self._attributes_before = _module_attributes(self._glue_modules)
        return ScriptRecorder(
            self._blocks, self._known_tensors, inputs, check_blocks=key not in self._checked
        )

    def store(self, key: Hashable, recorder: ScriptRecorder, result: Any) -> None:
        """Stores the script of a run that returned `result`."""
        before, now = self._attributes_before, _module_attributes(self._glue_modules)
        self._attributes_before = []
        if len(now) != len(before) or not all(map(is_, now, before)):
            if key not in self._changed_once:  # a cache filled in the first run is allowed
                self._changed_once.add(key)
                return
            recorder.fail("the forward changes attributes of the model")
        script = recorder.finish(result)
        if script is None:
            self.failure_reasons[key] = recorder.failure_reason
        else:
            self._scripts[key] = script
            self._checked.add(key)
