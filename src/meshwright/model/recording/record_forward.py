"""Records a forward, with one function mode, one dispatch mode, and hooks on the modules.

The function mode sees the calls that the model's code makes, the dispatch mode the operations below
autograd; hooks see modules, and autograd's own hooks what it saves. Every tensor is met as a Python object,
which is the same at both levels; a weak reference tells when it is gone, so nothing is kept alive. Storages
are known by weak references of torch's own, which keep their addresses from being used again.

Cost: about 10 us per operation and torch call, beside 35 us that an operation on fake tensors takes.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from meshwright.model.recording.forward_recording import (
    AtenOp,
    BlockBoundaries,
    BlockEnd,
    BlockStart,
    FunctionCall,
    ModelRecompute,
    ModuleEnd,
    ModuleStart,
    Opaque,
    RandomDraw,
    Recording,
    SavedTensor,
    TensorFreed,
    TensorRecord,
)
from meshwright.model.tensors.call_description import in_user_checkpoint
from meshwright.model.tensors.fake_tensor_limits import asks_for_device
from meshwright.model.tensors.garbage_collection import pause_garbage_collection
from meshwright.model.tensors.pytree import dataclass_items, is_dataclass_instance

PACKAGE, TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
TORCH_MODULES = str(Path(nn.modules.__file__).parent)
CONSTANTS = frozenset(
    (type(None), bool, int, float, complex, str, slice, type(...), torch.dtype, torch.device)
)
INDEX_OPS = frozenset((torch.ops.aten.index, torch.ops.aten.index_select))


class TensorRecords:
    """The records of the tensors of one recording; `on_free(id)` is called when a tensor is gone."""

    def __init__(self, on_free: Callable[[int], None]) -> None:
        self._on_free, self._num_tensors = on_free, 0
        # by the id of the Python object, which is free for another tensor when its weak reference dies
        self._records: dict[int, tuple[weakref.ref, TensorRecord]] = {}
        self._storages: dict[int, tuple[int, StorageWeakRef]] = {}

    def describe(self, tensor: torch.Tensor, *, refresh: bool = False) -> TensorRecord:
        """Returns the record of `tensor` as it is now."""
        known = self._records.get(id(tensor))
        if known is not None and not refresh:
            record = known[1]
            if record.version == _version(tensor) and record.requires_grad == tensor.requires_grad:
                return record
        if known is None:
            self._num_tensors += 1
            number, key = self._num_tensors, id(tensor)
            reference = weakref.ref(tensor, partial(self._forget, key, number))
        else:
            number, reference = known[1].id, known[0]
        record = self._make_record(tensor, number)
        self._records[id(tensor)] = reference, record
        return record

    def close(self) -> None:
        """Stops hearing of tensors that are gone."""
        self._records.clear()

    def storage_number(self, tensor: torch.Tensor) -> int:
        """Returns the number of the storage of `tensor`; 0 for a sparse tensor."""
        if tensor.layout != torch.strided:
            return 0
        storage = tensor.untyped_storage()
        found = self._storages.get(storage._cdata)
        if found is None:
            found = self._storages[storage._cdata] = len(self._storages) + 1, StorageWeakRef(storage)
        return found[0]

    def _make_record(self, tensor: torch.Tensor, number: int) -> TensorRecord:
        strided = tensor.layout == torch.strided
        return TensorRecord(
            number,
            self.storage_number(tensor),
            _version(tensor),
            tensor.shape,
            tensor.stride() if strided else (),
            int(tensor.storage_offset()) if strided else 0,
            tensor.dtype,
            tensor.requires_grad,
            tensor.untyped_storage().nbytes() if strided else 0,
            strided,
        )

    def _forget(self, key: int, number: int, reference: weakref.ref) -> None:
        self._records.pop(key, None)
        self._on_free(number)


@dataclass(eq=False)
class ForwardRecorder:
    """Records what runs inside `recording()`, of a `module` with `blocks`.

    `layer_roles` and `layer_kinds` go into the recording as they are. `count_draws()` returns the draws of
    the running block call; `check_glue_call(function)` may refuse a call in glue. Whoever runs the blocks
    calls `begin_block_call` before each block call.
    """

    module: nn.Module
    blocks: Mapping[str, nn.Module]
    num_samples: int
    layer_roles: Mapping[str, str] = field(default_factory=dict)
    layer_kinds: Mapping[str, str] = field(default_factory=dict)
    count_draws: Callable[[], int] = lambda: 0
    check_glue_call: Callable[[Any], None] = lambda function: None

    def __post_init__(self) -> None:
        self._events: list[Any] = []
        self._records = TensorRecords(lambda number: self._events.append(TensorFreed(number)))
        self._pending_call = self._block_call = ""  # before its forward; while it runs
        self._is_recomputed = False
        self._saved: list[torch.Tensor] = []
        self._draws = 0
        named = partial(self.module.named_parameters, remove_duplicate=False)
        self._parameters = {name: self._records.describe(each) for name, each in named()}
        self._buffers = self._describe_buffers()

    @property
    def last_block_call(self) -> str:
        """The block call that began last; "" before the first."""
        return next((e.block_call for e in reversed(self._events) if type(e) is BlockStart), "")

    def begin_block_call(self, block_call: str) -> None:
        """Names the block call that begins next."""
        self._pending_call, self._draws = block_call, 0

    def describe(self, tensor: torch.Tensor) -> TensorRecord:
        """Returns the record of `tensor` in the recording."""
        return self._records.describe(tensor)

    def storage_number(self, tensor: torch.Tensor) -> int:
        """Returns the storage of `tensor` as it is numbered in the recording."""
        return self._records.storage_number(tensor)

    def finish(
        self, outputs: Any, boundaries: BlockBoundaries | None = None, *, writes_in_place: bool = False
    ) -> Recording:
        """Returns the recording of a forward that returned `outputs`."""
        inner_ids = {id(part) for block in self.blocks.values() for part in block.modules()} - {
            id(block) for block in self.blocks.values()
        }
        described, written = self._describe(outputs), self._written_buffers()
        self._records.close()
        return Recording(
            self.num_samples,
            self._parameters,
            self._buffers,
            tuple(self.blocks),
            frozenset(name for name, part in self.module.named_modules() if id(part) in inner_ids),
            dict(self.layer_roles),
            dict(self.layer_kinds),
            self._events,
            described,
            written,
            writes_in_place,
            boundaries or BlockBoundaries(),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager: records the forward that runs inside."""
        block_names = {id(block): name for name, block in self.blocks.items()}
        handles = [
            handle
            for name, part in self.module.named_modules()
            for each in dict.fromkeys((block_names.get(id(part), name), name))
            for handle in self._add_hooks(each, part)
        ]
        own_forwards = {name: block.__dict__.get("forward") for name, block in self.blocks.items()}
        for name, block in self.blocks.items():
            block.forward = partial(self._run_block, name, block.forward)
        # an index, since the graph of an output that it saves itself would never be freed
        saving = torch.autograd.graph.saved_tensors_hooks(self._note_saved, self._saved.__getitem__)
        try:
            with pause_garbage_collection(), _OpMode(self), saving, _CallMode(self):
                yield
        finally:
            self._saved.clear()
            for handle in handles:
                handle.remove()
            for name, block in self.blocks.items():
                block.__dict__.pop("forward", None)
                if own_forwards[name] is not None:
                    block.__dict__["forward"] = own_forwards[name]

    def record_op(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Returns the result of the operation `func`, which it records."""
        if asks_for_device(func, args):
            return args[0].device
        with torch._C.DisableTorchFunction():
            given, named = self._describe(args), self._describe(kwargs)
            if func._overloadpacket in INDEX_OPS:
                given = self._with_known_indices(given, args)
        grad_enabled = torch.is_grad_enabled()
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            results = self._describe(out)
        self._events.append(AtenOp(_op_name(func), given, named, results, self._block_call, grad_enabled))
        return out

    def record_call(self, func: Any, args: tuple[Any, ...], kwargs: Any, frame: FrameType | None) -> Any:
        """Returns the result of the torch function `func`, which it records; `frame` made the call."""
        if not self._block_call:
            self.check_glue_call(func)
        elif not self._is_recomputed and in_user_checkpoint():
            self._is_recomputed = True
            self._events.append(ModelRecompute(self._block_call))
        with torch._C.DisableTorchFunction():
            given, named = self._describe(args), self._describe(kwargs)
        frame, by_model = calling_frame(frame)
        name = func.__name__
        owner = func.__self__.__name__ if name in ("__get__", "__set__") else ""
        place, grad_enabled = len(self._events), torch.is_grad_enabled()
        self._events.append(None)
        out = target = results = None
        try:
            out = func(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                if name == "__set__":
                    target = self._records.describe(args[0], refresh=True)
                results = self._describe(out)
            self._note_draws(name)
            return out
        finally:
            self._events[place] = FunctionCall(
                name,
                owner,
                given,
                named,
                results,
                self._block_call,
                frame.f_code.co_filename if frame is not None else "",
                frame.f_lineno if frame is not None else 0,
                by_model,
                grad_enabled,
                len(self._events) - place - 1,
                target,
            )

    def _note_draws(self, name: str) -> None:
        number = self.count_draws()
        for each in range(self._draws, number):
            self._events.append(RandomDraw(name, each, self._block_call))
        self._draws = number

    def _note_saved(self, tensor: torch.Tensor) -> int:
        with torch._C.DisableTorchFunction():
            self._events.append(SavedTensor(self._records.describe(tensor), self._block_call))
        self._saved.append(tensor)
        return len(self._saved) - 1

    def _add_hooks(self, name: str, module: nn.Module) -> Iterator[RemovableHandle]:
        own = [None]
        if module._forward_hooks:  # they may change what it returns
            yield module.register_forward_hook(partial(self._note_own_results, own), prepend=True)
        yield module.register_forward_pre_hook(partial(self._start_module, name), with_kwargs=True)
        yield module.register_forward_hook(partial(self._end_module, name, own))

    def _start_module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            given, named = self._describe(args), self._describe(kwargs)
        self._events.append(ModuleStart(name, given, named, self._block_call, torch.is_grad_enabled()))

    def _note_own_results(self, own: list[Any], module: nn.Module, args: Any, out: Any) -> None:
        with torch._C.DisableTorchFunction():
            own[0] = self._describe(out)

    def _end_module(self, name: str, own: list[Any], module: nn.Module, args: Any, out: Any) -> None:
        with torch._C.DisableTorchFunction():
            given, results = self._describe(args), self._describe(out)
        own_results, own[0] = own[0] if own[0] is not None else results, None
        self._events.append(
            ModuleEnd(name, given, results, own_results, self._block_call, torch.is_grad_enabled())
        )

    def _run_block(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._pending_call:  # inside another block call, or without gradients
            return forward(*args, **kwargs)
        self._block_call, self._pending_call, self._is_recomputed = self._pending_call, "", False
        with torch._C.DisableTorchFunction():
            given, named = self._describe(args), self._describe(kwargs)
        self._events.append(BlockStart(name, self._block_call, given, named))
        try:
            outputs = forward(*args, **kwargs)
            with torch._C.DisableTorchFunction():
                self._events.append(BlockEnd(name, self._block_call, self._describe(outputs)))
        finally:
            self._block_call = ""
        return outputs

    def _describe(self, value: Any) -> Any:
        kind = type(value)
        if kind in CONSTANTS:
            return value
        if isinstance(value, torch.Tensor):
            return self._records.describe(value)
        if isinstance(value, torch.Size):
            return value
        if isinstance(value, tuple):
            return tuple([self._describe(each) for each in value])
        if isinstance(value, list):
            return [self._describe(each) for each in value]
        if isinstance(value, dict):
            return {key: self._describe(each) for key, each in value.items()}
        if is_dataclass_instance(value):
            return {key: self._describe(each) for key, each in dataclass_items(value).items()}
        return Opaque(text_of_object(value))

    def _with_known_indices(self, given: Any, args: Any) -> Any:
        """Returns the recorded arguments of an indexing operation, with the known values of its indices."""
        indices = {}
        for tensor in args[1] if isinstance(args[1], (list, tuple)) else args[2:3]:
            if isinstance(tensor, torch.Tensor) and (values := _known_values(tensor)) is not None:
                indices[self._records.describe(tensor).id] = values
        return _replace_values(given, indices) if indices else given

    def _written_buffers(self) -> tuple[str, ...]:
        """Returns the buffers that were replaced or written since the recorder was made."""
        before, now = self._buffers, self._describe_buffers()
        known = {name: (record.id, record.version) for name, record in before.items()}
        return tuple(name for name, record in now.items() if known.get(name) != (record.id, record.version))

    def _describe_buffers(self) -> dict[str, TensorRecord]:
        return {name: self._records.describe(each) for name, each in self.module.named_buffers()}


class _CallMode(TorchFunctionMode):
    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.record_call(func, args, kwargs or {}, sys._getframe(1))


class _OpMode(TorchDispatchMode):
    def __init__(self, recorder: ForwardRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorder.record_op(func, args, kwargs or {})


@lru_cache(maxsize=4096)
def _op_name(func: Any) -> str:
    return str(func)


def calling_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Returns the frame of the model's code that calls an operation, and whether the model calls it, not the
    library itself.
    """
    in_module, by_model = False, True
    while frame is not None and (file := frame.f_code.co_filename).startswith((TORCH, PACKAGE)):
        in_module = in_module or file.startswith(TORCH_MODULES)
        # a module may be a block, which the library calls
        by_model = by_model and (in_module or not file.startswith(PACKAGE))
        frame = frame.f_back
    return frame, by_model


def text_of_object(value: Any) -> str:
    """Returns text that two objects share if they are equal; objects of unknown classes are taken as such."""
    if isinstance(value, np.ndarray):
        return f"an array {list(value.shape)} (hash {crc32(value.tobytes()) % 2**16:04x})"
    if isinstance(value, (np.generic, int, float, str)):
        return repr(value)
    return type(value).__name__


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _known_values(index: torch.Tensor) -> tuple[int, ...] | None:
    """The values of `index` if they are known: a fake tensor keeps those of a literal list."""
    if index.ndim != 1 or index.dtype == torch.bool:
        return None
    known = index.constant if isinstance(index, FakeTensor) else index
    with no_dispatch():
        return None if known is None else tuple(known.tolist())


def _replace_values(value: Any, values: Mapping[int, tuple[int, ...]]) -> Any:
    if isinstance(value, TensorRecord):
        if value.id not in values:
            return value
        return replace(value, values=values[value.id])
    if isinstance(value, (tuple, list)):
        return type(value)(_replace_values(each, values) for each in value)
    return value
