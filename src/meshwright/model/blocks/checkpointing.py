"""Activation checkpointing of one block call: keeps its inputs, drops activations, recomputes them later.

    first run    x ---> [block] ---> y      saved tensors are dropped when the block ends; leaves replace y
    recompute    x ---> [block] ---> y'     from the kept inputs: the same bits, now with a graph

The first run has gradients enabled, and a graph that is thrown away: so which tensors need a gradient, which
kernel runs and which branch a model takes are those of a run without checkpointing. To be bitwise equal, the
second run must find what the first one found:

    input tensors        kept, not copied: a version counter shows a later write, which is refused; if the
                         model writes in place, those that need a gradient are copied
    lists, dicts         copied when the block is entered, so that writes into them happen once
    buffers, attributes  restored from a `ModuleSnapshot`, and put back afterwards
    autocast, modes      those that were active where the model called the block
    random numbers       drawn by sample and site, so they repeat; the engine sets which forward it is
    captured tensors     captured again, in separate lists (model/hf/captured_outputs.py)

A forward may write: batch norm its running statistics, a router a count of tokens, a layer a counter. The
snapshot makes a write happen once:

    first run    buffers b0 --- run ---> b1       b0 is copied before; copies of unwritten buffers are dropped
    second run   buffers b0 --- run ---> (b1)     on copies, which are dropped; the module's own are restored

Attributes of the modules (a plain counter) are treated alike. A write into a list or dict in an attribute is
not seen.

A tensor that leaves the block inside an opaque object has lost what its backward needs; that is an error.

Of block calls in a row all but the first may drop their inputs too (`drop_inputs_of`):

    first run    x0 ---> [0] ---> x1 ---> [1] ---> x2 ---> [2] ---> x3         x0 is kept, and x3
    later        x0 ---> [0] ---> x1' --> [1] ---> x2'      then 2 is recomputed, then 1, then 0

`recompute_outputs` makes x1' and x2' without a graph; `recompute` makes the outputs with their graph. New
leaves then take the places of those that were dropped. A leaf that something else still holds stays the leaf,
because it may be given a gradient there: the results are right, and the memory is not saved.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import TensorWeakRef

from meshwright.model.hf.captured_outputs import CaptureLists, capture_into, empty_capture_lists
from meshwright.model.tensors.pytree import (
    copy_containers,
    map_leaves,
    opaque_tensors,
    replace_tensors,
    tree_tensors,
    value_leaves,
)
from meshwright.plan.job.errors import PlanError


@dataclass(slots=True)
class _SubmoduleSnapshot:
    module: nn.Module
    attributes: dict[str, object]
    buffers: dict[str, tuple[torch.Tensor, int]]
    values: dict[str, torch.Tensor | None]

    @property
    def written(self) -> bool:
        # the kernels of batch norm write statistics without a new version
        if isinstance(self.module, nn.modules.batchnorm._NormBase):
            return bool(self.buffers)
        now = _buffer_versions(self.module)
        return now.keys() != self.buffers.keys() or any(
            buffer is not now[name][0] or version != now[name][1]
            for name, (buffer, version) in self.buffers.items()
        )

    def set_attributes(self, target: dict[str, object]) -> None:
        attributes = vars(self.module)
        for key in [key for key in attributes if key not in target]:
            del attributes[key]
        attributes.update(target)


class ModuleSnapshot:
    """The buffers and attributes of `module` and its submodules, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [_snapshot(each) for each in module.modules()]

    def drop_unwritten(self) -> None:
        """Drops everything that the run since then has not written."""
        for part in self._parts:
            part.values = part.values if part.written else {}
            part.buffers = {}  # the objects are only needed to compare
            part.attributes = (
                part.attributes
                if _attributes_differ(part.attributes, _module_attributes(part.module))
                else {}
            )
        self._parts = [part for part in self._parts if part.values or part.attributes]

    @contextmanager
    def restored_state(self, *, reusable: bool = False) -> Iterator[None]:
        """Context manager: restores the snapshot on entry, and the present state on exit.

        With `reusable`, what runs inside writes into copies, and the snapshot may be restored once more.
        """
        now = [(part, _module_attributes(part.module), dict(part.module._buffers)) for part in self._parts]
        for part in self._parts:
            if part.attributes:
                part.set_attributes(part.attributes)
            values = part.values
            if reusable:
                values = {name: each if each is None else each.clone() for name, each in values.items()}
            part.module._buffers.update(values)
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
    return dict(vars(module))  # the dicts of parameters, buffers and submodules stay the same objects


def _buffer_versions(module: nn.Module) -> dict[str, tuple[torch.Tensor, int]]:
    return {name: (buffer, buffer._version) for name, buffer in module._buffers.items() if buffer is not None}


def _attributes_differ(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() != other.keys() or any(value is not other[key] for key, value in one.items())


CHECKPOINT_FIX = "exclude this block from activation checkpointing (the strategy's `blocks`)"
AutocastState = tuple[str, bool, torch.dtype]  # (device type, enabled, dtype)
RunBlock = Callable[..., Any]
MakeAlias = Callable[
    [torch.Tensor, torch.Tensor], torch.Tensor
]  # (leaf, values) -> the leaf with these values


class DroppedInput:
    """The place of an input that is not kept: output number `index` of the block call before. It is no
    dataclass, because the pytree functions look into dataclasses.
    """

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class DroppedLeaf:
    """The place of an output leaf that is not kept, but by whoever else uses it."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self.description = _shape_and_dtype(leaf)
        self._weak_leaf: Callable[[], torch.Tensor | None] = TensorWeakRef(leaf)
        self._leaf_with_grad: torch.Tensor | None = None
        # a user of the leaf may give it a gradient and end before it is made again
        self._hook = leaf.register_post_accumulate_grad_hook(self._keep)

    def find(self) -> torch.Tensor | None:
        """Returns the leaf, if something else uses it or it has a gradient."""
        return self._weak_leaf() if self._leaf_with_grad is None else self._leaf_with_grad

    def _keep(self, leaf: torch.Tensor) -> None:
        self._leaf_with_grad = leaf
        self._hook.remove()


@dataclass(slots=True)
class CheckpointedCall:
    """The values that a checkpointed block call keeps until it is recomputed. `output_leaves` replace its
    outputs. Of the inputs that `producer` returned, if it is set, only the places are kept.
    """

    block_call: str
    run: RunBlock
    inputs: Any  # (args, kwargs)
    versions: list[tuple[torch.Tensor, int]]
    snapshot: ModuleSnapshot
    autocast: tuple[AutocastState, ...]
    function_modes: list[TorchFunctionMode]  # outermost first
    capture_lists: CaptureLists | None
    input_copies: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # of tensors in `inputs` that may be written in place, by id
    output_leaves: list[torch.Tensor | DroppedLeaf] = field(default_factory=list)
    opaque_versions: list[tuple[int, int]] = field(default_factory=list)
    producer: "CheckpointedCall | None" = None

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
        """Returns the record of `run(*args, **kwargs)`, with `inputs` as (args, kwargs).

        `input_leaves` replace tensors in it, by id; with `copy_inputs` they may be written in place, so their
        values are copied.
        """
        values = {id(leaf): leaf.detach().clone() for leaf in input_leaves.values()} if copy_inputs else {}
        kept_inputs = replace_tensors(copy_containers(inputs), input_leaves)
        found = tree_tensors(kept_inputs)
        versions = [(tensor, tensor._version) for tensor in found if id(tensor) not in values]
        kinds = {"cpu", *(tensor.device.type for tensor in found)}
        autocast = tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.amp.is_autocast_available(kind)
        )
        call = cls(
            block_call,
            run,
            kept_inputs,
            versions,
            ModuleSnapshot(block),
            autocast,
            _get_current_function_mode_stack(),
            empty_capture_lists(),
            values,
        )
        call.opaque_versions = _opaque_versions(inputs)
        return call

    def drop_inputs_of(self, producer: "CheckpointedCall") -> None:
        """Keeps none of the inputs that `producer`, the block call before, has returned: both then drop them
        when this one has run, and `producer` must run again before this one does.
        """
        places = {id(leaf): index for index, leaf in enumerate(producer.output_leaves)}
        self.inputs = map_leaves(
            self.inputs, lambda leaf: DroppedInput(places[id(leaf)]) if id(leaf) in places else leaf
        )
        self.versions = [(tensor, version) for tensor, version in self.versions if id(tensor) not in places]
        self.producer = producer

    @contextmanager
    def first_run(self, inputs: Any) -> Iterator[None]:
        """Context manager around the first run: drops what its graph saves.

        Raises PlanError if the run cannot be repeated.
        """
        with _drop_saved_tensors(self.block_call):
            yield
        self.snapshot.drop_unwritten()
        if self.producer is not None:
            leaves = self.producer.output_leaves
            for place in value_leaves(self.inputs):
                if isinstance(place, DroppedInput) and isinstance(leaf := leaves[place.index], torch.Tensor):
                    leaves[place.index] = DroppedLeaf(leaf)
        if _opaque_versions(inputs) != self.opaque_versions:
            text = (
                f"the block '{self.block_call}' writes into an object among its inputs, and would write twice"
            )
            raise PlanError(
                text, fix=f"build the model with use_cache=False, or {CHECKPOINT_FIX}", location="model"
            )

    def recompute(self, alias: MakeAlias) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs the block again; returns its outputs, now with a graph, each with the leaf that replaces it.

        `alias(leaf, values)` is a tensor with these values whose gradient is the leaf's. Raises PlanError if
        an input was written since, and if the outputs differ from those of the first run.
        """
        found = self._run_again(alias)
        leaves = self._restore_leaves(found)
        for tensor, leaf in zip(found, leaves, strict=True):
            tensor.data = leaf.detach()  # frees its memory: the backward reads the graph alone
        return list(zip(found, leaves, strict=True))

    def recompute_outputs(self, alias: MakeAlias) -> None:
        """Runs the block again for the outputs that were dropped, without a graph. Raises as `recompute`."""
        # also where something still holds them: that may differ by rank, and the block may call collectives
        if not any(isinstance(leaf, DroppedLeaf) for leaf in self.output_leaves):
            return
        with _drop_saved_tensors(self.block_call):
            outputs = self._run_again(alias, again=True)
        self._restore_leaves(outputs)

    def _restore_leaves(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the leaves of the outputs `found`: new ones for those that were dropped and are gone.

        One that is alive stays the leaf: whoever holds it may give it a gradient.
        """
        restored = []
        for tensor, leaf in zip(found, self.output_leaves, strict=True):
            kept = leaf.find() if isinstance(leaf, DroppedLeaf) else leaf
            restored.append(tensor.detach().requires_grad_() if kept is None else kept)
        self.output_leaves = list(restored)
        return restored

    def _run_again(self, alias: MakeAlias, *, again: bool = False) -> list[torch.Tensor]:
        """Returns the outputs that need gradients of another run; `again`: it is not the last one."""
        if any(tensor._version != version for tensor, version in self.versions):
            text = (
                f"an input of the block '{self.block_call}' was written in place after the block ran, and "
                "its recomputation needs it"
            )
            raise PlanError(
                text, fix=f"write x = x + y for x += y there, or {CHECKPOINT_FIX}", location="model"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            inputs = self.inputs if self.producer is None else map_leaves(self.inputs, self._input)
            leaves = [tensor for tensor in tree_tensors(inputs) if id(tensor) in self.input_copies]
            args, kwargs = replace_tensors(
                inputs, {id(leaf): alias(leaf, self.input_copies[id(leaf)]) for leaf in leaves}
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
            stack.enter_context(self.snapshot.restored_state(reusable=again))
            marks = stack.enter_context(capture_into(self.capture_lists))
            outputs = self.run(*args, **kwargs)
            found = tensors_with_graph([outputs, *(mark.added_tensors for mark in marks)])
        if [_shape_and_dtype(tensor) for tensor in found] != [
            leaf.description if isinstance(leaf, DroppedLeaf) else _shape_and_dtype(leaf)
            for leaf in self.output_leaves
        ]:
            text = (
                f"the block '{self.block_call}' returns {len(found)} tensors that need gradients when it is "
                "recomputed, or others than"
            )
            text = f"{text} the {len(self.output_leaves)} of its first run"
            fix = f"make its forward depend only on its inputs, weights and buffers, or {CHECKPOINT_FIX}"
            raise PlanError(text, fix=fix, location="model")
        return found

    def _input(self, leaf: Any) -> Any:
        """Returns `leaf` of the inputs, or what the block call before has returned anew in its place."""
        if not isinstance(leaf, DroppedInput) or self.producer is None:
            return leaf
        made = self.producer.output_leaves[leaf.index]
        found = made.find() if isinstance(made, DroppedLeaf) else made
        if found is None:
            raise RuntimeError(
                f"{self.block_call} is recomputed, and its input was dropped; put a rerun of "
                f"{self.producer.block_call} before it"
            )
        return found


def tensors_with_graph(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in `value` that need a leaf at a block boundary: those with a graph, each once."""
    found = (tensor for tensor in tree_tensors(value) if tensor.requires_grad and not tensor.is_leaf)
    return list({id(tensor): tensor for tensor in found}.values())


@contextmanager
def _drop_saved_tensors(block_call: str) -> Iterator[None]:
    # until the context ends, a block may take gradients inside itself
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor.detach())  # an output saved by its own graph would keep the graph alive
        return len(saved) - 1

    def unpack(index: int) -> torch.Tensor:
        if saved:
            return saved[index]
        text = (
            f"a backward passes through the block '{block_call}' by a path other than its inputs and "
            "outputs, and nothing was saved there"
        )
        raise PlanError(
            text,
            fix=f"return tensors directly, in tuples, lists, dicts or dataclasses, or {CHECKPOINT_FIX}",
            location="model",
        )

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        saved.clear()


def _shape_and_dtype(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _opaque_versions(inputs: Any) -> list[tuple[int, int]]:
    return [(id(tensor), tensor._version) for tensor in opaque_tensors(inputs)]
