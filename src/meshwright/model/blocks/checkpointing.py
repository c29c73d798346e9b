"""A visit that keeps what it took in and not what it computed, and is run again before its backward.

    lean    x ---> [block] ---> y      what autograd saves is dropped when the block ends; leaves stand for y, as in any visit
    again   x ---> [block] ---> y'     from what was kept: the same bits, now with a graph, which starts at the same leaves

The lean run has gradients switched on, and a graph that is thrown away: so what needs a gradient, which kernel runs and which
branch a model takes are those of a plain run. To be the same once more, a run must find what it found before:

    tensors it took      kept, not copied: a version tells whether somebody wrote into one since, which is refused; where a model
                         writes in place, those that need a gradient are copied
    lists, dicts         copied as they were when the block was entered, so that what is written into them is written once
    buffers, attributes  as they were, and put back afterwards (model/before.py)
    autocast, modes      as they were where the model called the block
    random numbers       drawn by sample and site, so they are; the engine says which forward it is
    captured tensors     caught once more, in lists of their own (model/captured.py)

What a block hands past its border in an object that nobody looks into has lost what its backward needs, and says so.

What the parts of a block hold before a run, so that the run can be had again, and what it writes is written once.

A forward may write: batch norm its running statistics, a router a count of tokens, a layer a number of its own. A second run
of the same forward must find what the first one found, and leave what the first one left:

    first run    buffers b0 --- run ---> b1       b0 is copied before; the copy of what was not written is let go of at once
    second run   buffers b0 --- run ---> (b1)     in copies, which are thrown away; the module has its own buffers back

Attributes of the modules (a counter that is a plain number) are treated alike, by what they are set to. A list or a dict in
an attribute that a forward writes into is not seen.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from meshwright.model.hf.output_capture import CaptureLists, capture_into, empty_capture_lists
from meshwright.model.tensors.pytree import copy_containers, opaque_tensors, replace_tensors, tree_tensors
from meshwright.plan.job.errors import PlanError


@dataclass(slots=True)
class _SubmoduleSnapshot:
    """One module: its attributes, its buffers with their versions, and copies of their values."""

    module: nn.Module
    attributes: dict[str, object]
    buffers: dict[str, tuple[torch.Tensor, int]]
    values: dict[str, torch.Tensor | None]

    @property
    def written(self) -> bool:
        """Whether a run since may have written a buffer. The kernels of norms write statistics without a new version."""
        if isinstance(self.module, nn.modules.batchnorm._NormBase):
            return bool(self.buffers)
        now = _buffer_versions(self.module)
        return now.keys() != self.buffers.keys() or any(
            buffer is not now[name][0] or version != now[name][1]
            for name, (buffer, version) in self.buffers.items()
        )

    def set_attributes(self, wanted: dict[str, object]) -> None:
        """Make the attributes what they are in `wanted`."""
        held = vars(self.module)
        for key in [key for key in held if key not in wanted]:
            del held[key]
        held.update(wanted)


class ModuleSnapshot:
    """The buffers and attributes of `module` and its parts, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_snapshot(each) for each in module.modules()]

    def drop_unwritten(self) -> None:
        """Let go of all that the run since then has not written."""
        for part in self._parts:
            part.values = part.values if part.written else {}
            part.buffers = {}  # the objects: only needed to tell
            part.attributes = (
                part.attributes if _differ(part.attributes, _module_attributes(part.module)) else {}
            )
        self._parts = [part for part in self._parts if part.values or part.attributes]

    @contextmanager
    def restored_state(self) -> Iterator[None]:
        """Everything as it was, meanwhile; afterwards it is what it was when this was entered, whatever was written."""
        now = [(part, _module_attributes(part.module), dict(part.module._buffers)) for part in self._parts]
        for part in self._parts:
            if part.attributes:
                part.set_attributes(part.attributes)
            part.module._buffers.update(part.values)
        try:
            yield
        finally:
            for part, attributes, buffers in now:
                part.set_attributes(attributes)
                part.module._buffers.update(buffers)


def _snapshot(module: nn.Module) -> _SubmoduleSnapshot:
    values = {
        name: None if buffer is None else buffer.detach().clone() for name, buffer in module._buffers.items()
    }
    return _SubmoduleSnapshot(module, _module_attributes(module), _buffer_versions(module), values)


def _module_attributes(module: nn.Module) -> dict[str, object]:
    return dict(vars(module))  # those that hold parameters, buffers and parts are the same objects all along


def _buffer_versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    return {name: (buffer, buffer._version) for name, buffer in module._buffers.items() if buffer is not None}


def _differ(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() != other.keys() or any(value is not other[key] for key, value in one.items())


CHECKPOINT_FIX = "leave this block out of those that are run again (the strategy's `blocks`)"
AutocastState = tuple[str, bool, torch.dtype]  # the kind of device, whether it is on, and the dtype
RunBlock = Callable[..., Any]


@dataclass(slots=True)
class CheckpointedCall:
    """What a lean visit keeps until it is run again. `leaves` stand for its outputs, in order."""

    block_call: str
    run: RunBlock
    inputs: Any  # its arguments: (args, kwargs)
    versions: list[tuple[torch.Tensor, int]]
    snapshot: ModuleSnapshot
    autocast: tuple[AutocastState, ...]
    function_modes: list[TorchFunctionMode]  # outermost first
    capture_lists: CaptureLists | None
    input_copies: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # of tensors in `given` that may be written into, by id
    output_leaves: list[torch.Tensor] = field(default_factory=list)
    opaque_versions: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def from_inputs(
        cls,
        block_call: str,
        block: nn.Module,
        run: RunBlock,
        inputs: Any,
        input_leaves: Mapping[int, torch.Tensor],
        *,
        copy_inputs: bool,
    ) -> "CheckpointedCall":
        """What is to be kept of `run(*args, **kwargs)`, `given` as (args, kwargs).

        `leaves` stand for tensors in it, by id; with `copies`, somebody may write into those, so their values are copied.
        """
        values = {id(leaf): leaf.detach().clone() for leaf in input_leaves.values()} if copy_inputs else {}
        mine = replace_tensors(copy_containers(inputs), input_leaves)
        found = tree_tensors(mine)
        versions = [(tensor, tensor._version) for tensor in found if id(tensor) not in values]
        kinds = {"cpu", *(tensor.device.type for tensor in found)}
        on = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        )
        kept = cls(
            block_call,
            run,
            mine,
            versions,
            ModuleSnapshot(block),
            on,
            _get_current_function_mode_stack(),
            empty_capture_lists(),
            values,
        )
        kept.opaque_versions = _opaque_versions(inputs)
        return kept

    @contextmanager
    def first_run(self, inputs: Any) -> Iterator[None]:
        """Round the first run, on `given`: what its graph would save is dropped. Raises PlanError when it cannot be had again."""
        with _drop_saved_tensors(self.block_call):
            yield
        self.snapshot.drop_unwritten()
        if _opaque_versions(inputs) != self.opaque_versions:
            text = (
                f"the block '{self.block_call}' writes into an object that it is given, and would write twice"
            )
            raise PlanError(
                text, fix=f"build the model with use_cache=False, or {CHECKPOINT_FIX}", location="model"
            )

    def recompute(
        self, alias: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run once more: the outputs, which now have a graph, each with the leaf that stands for it.

        `stand_in(leaf, values)` is a tensor with these values whose gradient is the leaf's. Raises PlanError when an input was
        written into since, and when the block gives something else than before.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            text = f"an input of the block '{self.block_call}' was written into in place after the block ran, which needs it once more"
            raise PlanError(
                text, fix=f"write x = x + y for x += y there, or {CHECKPOINT_FIX}", location="model"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            leaves = [tensor for tensor in tree_tensors(self.inputs) if id(tensor) in self.input_copies]
            args, kwargs = replace_tensors(
                self.inputs, {id(leaf): alias(leaf, self.input_copies[id(leaf)]) for leaf in leaves}
            )
            for kind, enabled, dtype in self.autocast:
                if (enabled, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    # no cache: a cached cast would join the graphs of two blocks
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                    )
            active = {id(mode) for mode in _get_current_function_mode_stack()}
            for mode in self.function_modes:
                if id(mode) not in active:
                    stack.enter_context(mode)
            stack.enter_context(self.snapshot.restored_state())
            marks = stack.enter_context(capture_into(self.capture_lists))
            outputs = self.run(*args, **kwargs)
            found = tensors_with_graph([outputs, *(mark.added_tensors for mark in marks)])
        if [_shape_and_dtype(tensor) for tensor in found] != [
            _shape_and_dtype(leaf) for leaf in self.output_leaves
        ]:
            text = f"the block '{self.block_call}' gives {len(found)} tensors that need gradients when it is run again, or others than"
            text = f"{text} the {len(self.output_leaves)} of its first run"
            fix = (
                f"let its forward depend on nothing but its inputs, weights and buffers, or {CHECKPOINT_FIX}"
            )
            raise PlanError(text, fix=fix, location="model")
        return list(zip(found, self.output_leaves, strict=True))


def tensors_with_graph(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` for which a block's border needs a leaf: those with a graph, each once, in order."""
    found = (tensor for tensor in tree_tensors(value) if tensor.requires_grad and not tensor.is_leaf)
    return list({id(tensor): tensor for tensor in found}.values())


@contextmanager
def _drop_saved_tensors(visit: str) -> Iterator[None]:
    """What autograd saves meanwhile is gone in the end; until then, a block may take gradients within itself."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor.detach())  # an output that its own graph held would hold the graph, for good
        return len(saved) - 1

    def unpack(place: int) -> torch.Tensor:
        if saved:
            return saved[place]
        text = f"a backward goes through the block '{visit}' other than by what it takes and gives, and nothing was kept there"
        raise PlanError(
            text,
            fix=f"return tensors bare, in tuples, lists, dicts or dataclasses, or {CHECKPOINT_FIX}",
            location="model",
        )

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        saved.clear()


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _opaque_versions(given: Any) -> list[tuple[int, int]]:
    """What changes when a tensor in an object that nobody looks into is written or replaced."""
    return [(id(tensor), tensor._version) for tensor in opaque_tensors(given)]
