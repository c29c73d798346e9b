"""Copies what block calls keep for their backward to the host and back (activation_offload.py).

    not checkpointed   autograd's hooks for saved tensors see each tensor that the call saves. A storage is
                       kept once; a saved tensor is a view of it (dtype, size, stride, offset), which is made
                       again when the backward asks for it
    checkpointed       the leaf that replaces the output of the block before, and that the call keeps as its
                       input, gets other memory: its identity and its gradient are those of the leaf

While a tensor is on the host, whoever reads it on an accelerator meets an error, not old numbers. Nothing is
held here but by weak references: what a step keeps is freed with its graph, also if the step fails.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.model.tensors.pytree import storage_id, tree_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import block_of
from meshwright.plan.step.memory.activation_copies import ACTIVATION_COPIES, FETCH, OFFLOAD
from meshwright.plan.step.program import Action
from meshwright.plan.step.single_device_program import CHECKPOINTED_FORWARD, FORWARD_KINDS
from meshwright.plan.strategy_interface import Handler

if TYPE_CHECKING:
    from meshwright.engine.runtime.rank_state import RankState

Key = tuple[str, int | None]  # block call and microbatch
PLAIN_TYPES = (torch.Tensor, FakeTensor)


class SavedStorage:
    """A storage in which tensors lie that autograd has saved: `flat` is all of it, on the device or the host.

    It is alive as long as one of its views, which the graph holds.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.flat, self.is_on_host = _whole_storage(tensor), False
        # of each view a tensor that shares its version counter, and the version; until it leaves
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._num_views, self._written = 0, frozenset[int]()

    def add_view(self, tensor: torch.Tensor) -> "SavedView":
        """Returns `tensor`, whose storage this is, as a view that can be made again."""
        self._versions.append((tensor.detach(), tensor._version))
        self._num_views += 1
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return SavedView(self, self._num_views - 1, *place)

    def move(self, flat: torch.Tensor, *, to_host: bool) -> None:
        """Goes on in the memory of `flat`, which gets the same numbers."""
        self._written |= self._written_views()
        self._versions.clear()  # they hold the memory that is left
        self.flat, self.is_on_host = flat, to_host

    def leave(self) -> None:
        """Gives up its memory, until it moves to other."""
        self.move(self.flat.new_empty(0), to_host=True)

    def is_written(self, view: int) -> bool:
        """Returns whether the view with this number was written in place after it was saved."""
        return view in self._written or view in self._written_views()

    def _written_views(self) -> frozenset[int]:
        return frozenset(
            number for number, (tensor, saved) in enumerate(self._versions) if tensor._version != saved
        )


@dataclass(frozen=True, slots=True)
class SavedView:
    """A saved tensor: where it lies in its storage."""

    storage: SavedStorage
    number: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def unpack(self) -> torch.Tensor:
        """Returns the tensor. Raises PlanError if it was written in place after it was saved."""
        if self.storage.is_written(self.number):
            raise _written_error(self.size)
        if self.storage.is_on_host:
            text = "a backward reads activations that are on the host"
            raise RuntimeError(f"{text}; put a {FETCH} before it, which it waits for")
        flat = self.storage.flat
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class StayingTensor:
    """A saved tensor that stays where it is."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        """Returns the tensor. Raises PlanError if it was written in place after it was saved."""
        if self.tensor._version != self.version:
            raise _written_error(self.tensor.shape)
        return self.tensor


def _written_error(size: torch.Size) -> PlanError:
    text = f"a tensor {list(size)} was written in place after an operation had saved it for its backward"
    return PlanError(text, fix="write y = f(x) in place of the operation in place", location="model")


class SavedTensors:
    """Collects what autograd saves inside `recording()`, by storage.

    Tensors on other devices than `device`, those with one of the `staying` storages, and those that are no
    plain memory stay.
    """

    def __init__(self, device: torch.device, staying: frozenset[int]) -> None:
        self._is_cpu, self._staying = device.type == "cpu", staying
        self._storages: dict[int, SavedStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager around the forward of a block."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def storages(self, outputs: Iterable[torch.Tensor]) -> list[SavedStorage]:
        """Returns the storages that were saved, but for those of `outputs`; forgets all."""
        held = {storage_id(tensor) for tensor in outputs if tensor.layout == torch.strided}
        found = [storage for key, storage in self._storages.items() if key not in held]
        self._storages.clear()
        return found

    def _pack(self, tensor: torch.Tensor) -> SavedView | StayingTensor:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if self._stays(tensor):
                # an output that its own graph saves would keep the graph alive
                return StayingTensor(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
            key = storage_id(tensor)
            if key not in self._storages:
                self._storages[key] = SavedStorage(tensor)
            return self._storages[key].add_view(tensor)

    def _stays(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return True
        if type(tensor) not in PLAIN_TYPES or tensor.layout != torch.strided or tensor.is_cpu != self._is_cpu:
            return True
        nbytes = tensor.untyped_storage().nbytes()
        if tensor.is_conj() or tensor.is_neg() or not nbytes or nbytes % tensor.itemsize:
            return True
        return storage_id(tensor) in self._staying


def _unpack(saved: SavedView | StayingTensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        return saved.unpack()


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of the storage of `tensor` as one vector that shares it."""
    numel = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((numel,), (1,), 0)


@dataclass(eq=False)
class InputLeaf:
    """An input that a checkpointed block call keeps: a leaf, alive as long as the calls around it."""

    leaf: weakref.ref[torch.Tensor]
    is_on_host: bool = False
    stride: tuple[int, ...] | None = None  # while it has no memory

    @property
    def flat(self) -> torch.Tensor:
        """All of its memory."""
        return _whole_storage(self._leaf)

    def move(self, flat: torch.Tensor, *, to_host: bool) -> None:
        """Goes on in the memory of `flat`, which gets the same numbers."""
        leaf = self._leaf
        leaf.data = flat.as_strided(leaf.shape, self.stride or leaf.stride(), 0)  # the version stays
        self.is_on_host, self.stride = to_host, None

    def leave(self) -> None:
        """Gives up its memory, until it moves to other."""
        leaf = self._leaf
        self.is_on_host, self.stride = True, leaf.stride()
        leaf.data = leaf.new_zeros(()).expand(leaf.shape)  # whoever reads it too early meets zeros

    @property
    def _leaf(self) -> torch.Tensor:
        leaf = self.leaf()
        if leaf is None:
            raise RuntimeError("the input of a checkpointed block call is gone before its copy")
        return leaf


class InputLeaves:
    """Finds the leaves that checkpointed block calls take as inputs: outputs of others, by their names.

    A leaf shares the storage of the output that it replaces.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._storages: dict[Key, int] = {}  # of an output, by name and microbatch

    @property
    def producers(self) -> list[str]:
        """The block calls that return them."""
        return list(dict.fromkeys(name.partition(":")[0] for name in sorted(self._names)))

    def note_outputs(self, forward: Action, inputs: Sequence[torch.Tensor], outputs: Any) -> None:
        """Notes what the block call of `forward` has returned, beside `inputs` that it has passed on."""
        known = {id(tensor) for tensor in inputs}
        made = {id(tensor): tensor for tensor in tree_tensors(outputs) if id(tensor) not in known}
        for number, tensor in enumerate(made.values()):
            name = f"{forward.subject}:{number}" if number else forward.subject
            if name in self._names:
                self._storages[name, forward.microbatch] = storage_id(tensor)

    def find(
        self, names: Iterable[str], microbatch: int | None, inputs: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the leaves among `inputs` by the names of the outputs that they replace. Those that share
        their storage with others are left out.
        """
        leaves = {storage_id(each): each for each in inputs if each.requires_grad and each.is_leaf}
        found = {name: leaves.get(self._storages.pop((name, microbatch), 0)) for name in names}
        return {
            name: leaf
            for name, leaf in found.items()
            if leaf is not None and leaf.untyped_storage().nbytes() == leaf.nbytes
        }


Kept = SavedStorage | InputLeaf


@dataclass
class _KeptByCall:
    """What a block call keeps: storages that its graph holds, or inputs."""

    storages: list[weakref.ref[SavedStorage]] = field(default_factory=list)
    inputs: list[InputLeaf] = field(default_factory=list)

    def alive(self) -> list[Kept]:
        """Returns what is still there."""
        storages = (reference() for reference in self.storages)
        return [
            *(storage for storage in storages if storage is not None),
            *(each for each in self.inputs if each.leaf() is not None),
        ]


class KeptTensorCopies:
    """Handles the copies of activations of one rank; wraps the forwards of the blocks that keep them."""

    def __init__(self, state: "RankState") -> None:
        self._state, actions = state, state.plan.actions
        self._offloads = {
            (action.subject, action.microbatch): action for action in actions if action.kind == OFFLOAD
        }
        self._forwards = {action.name: action for action in actions if action.kind in FORWARD_KINDS}
        self._kept: dict[Key, _KeptByCall] = {}
        self._leaves = InputLeaves(name for action in self._offloads.values() for name in action.tensors)
        calls = [*(call for call, _ in self._offloads), *self._leaves.producers]
        for block in dict.fromkeys(map(block_of, calls)):
            state.patches.wrap_forward(block, partial(self._run, block))
        self.handlers: dict[str, Handler] = dict(
            zip(ACTIVATION_COPIES, (self.offload, self.fetch), strict=True)
        )

    def _run(self, block: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block; notes what it keeps, if it leaves."""
        action = self._forwards.get(self._state.current_action)
        # not in an evaluation, a forward that runs again, or a block inside another
        if action is None or block_of(action.subject) != block or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        key, inputs = (action.subject, action.microbatch), tree_tensors((args, kwargs))
        if action.kind == CHECKPOINTED_FORWARD:
            if key in self._offloads:
                found = self._leaves.find(self._offloads[key].tensors, action.microbatch, inputs)
                self._kept[key] = _KeptByCall(
                    inputs=[InputLeaf(weakref.ref(leaf)) for leaf in found.values()]
                )
            outputs = forward(*args, **kwargs)
            self._leaves.note_outputs(action, inputs, outputs)
            return outputs
        if key not in self._offloads:
            return forward(*args, **kwargs)
        saved = SavedTensors(self._state.world.device, self._staying(block, inputs))
        with saved.recording():
            outputs = forward(*args, **kwargs)
        storages = saved.storages(tree_tensors(outputs))
        self._kept[key] = _KeptByCall(storages=list(map(weakref.ref, storages)))
        return outputs

    def _staying(self, block: str, inputs: Sequence[torch.Tensor]) -> frozenset[int]:
        module = self._state.trained_module.blocks[block]
        tensors = (*module.parameters(), *module.buffers(), *inputs)
        return frozenset(storage_id(tensor) for tensor in tensors if tensor.layout == torch.strided)

    def kept_tensors(self, action: Action, *, forget: bool = False) -> list[Kept]:
        """Returns what is still there of what the block call of `action` keeps; with `forget` for the last
        time.
        """
        key = action.subject, action.microbatch
        found = self._kept.pop(key, None) if forget else self._kept.get(key)
        return [] if found is None else found.alive()

    @torch.no_grad()
    def offload(self, action: Action) -> None:
        """Starts to copy what a block call keeps to the host; its device memory is free behind the copy."""
        pairs, host_memory = [], self._state.host_memory
        with torch._C.DisableTorchFunction():
            for each in self.kept_tensors(action):
                source = each.flat
                target = host_memory.empty(source.shape, source.dtype, source)
                pairs.append((target, source))
                each.move(target, to_host=True)
            work = host_memory.start_copies(action, pairs, read_on_host=False)
        self._state.issue(action, work)

    @torch.no_grad()
    def fetch(self, action: Action) -> None:
        """Starts to copy it back to the device."""
        pairs, device = [], self._state.world.device
        with torch._C.DisableTorchFunction():
            for each in self.kept_tensors(action, forget=True):
                source = each.flat
                target = source.new_empty(source.shape, device=device)
                pairs.append((target, source))
                each.move(target, to_host=False)
            work = self._state.host_memory.start_copies(action, pairs)
        self._state.issue(action, work)
