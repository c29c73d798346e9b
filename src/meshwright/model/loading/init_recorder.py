"""Runs a constructor so that its parameters take no memory, and records how it fills them.

    constructor                            here
    nn.Parameter(torch.empty(50, 8))       registered: the Parameter object itself becomes a meta tensor
    nn.Parameter(torch.ones(8))            registered: meta, and its value is kept (a constant as one number)
    weight.normal_(); weight[0].zero_()    caught by a dispatch mode and appended to the tape
    register_buffer(...)                   unchanged: buffers have real values

The constructor must not notice, because it branches: torch.nn.init silently skips meta tensors. So parameters
report the device CPU, and the one initializer that loops on drawn values, the truncated normal, is replaced.
The registration hook and that replacement affect the whole process; they are installed under a lock, act only
on the thread that installed them, and are always removed. The constructor draws from a copy of torch's
generator seeded by the job, so values that are computed before registration are the same in every process.

Refused, by name: reading a parameter's value, random operations that cannot be replayed, writes into a tensor
whose values became a parameter, uninitialized lazy parameters.
"""

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Never

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.model.loading.init_tape import (
    OVERWRITING_OPS,
    RANDOM_OPS,
    InitTape,
    StorageWindow,
    TapeEntry,
    truncated_normal_,
)
from meshwright.model.recording.op_table import find_op
from meshwright.model.tensors.counter_rng import derive_key
from meshwright.model.tensors.pytree import storage_id
from meshwright.plan.job.errors import PlanError

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
LARGE_NBYTES = 1 << 28  # bytes; smaller allocations are left to torch
MAP_NORESERVE = 0x4000  # Linux's flag, which Python names from 3.13 on
_INSTALLING = (
    threading.RLock()
)  # guards what is process-global: the hook, the replaced initializer, torch's generator


@contextmanager
def record_init(seed: int) -> Iterator[InitTape]:
    """Yields a tape; inside the context, constructors on this thread make meta parameters and record them."""
    recorder = InitRecorder(threading.get_ident())
    with _INSTALLING, ExitStack() as installed:
        hook = register_module_parameter_registration_hook(recorder.on_register_parameter)
        installed.callback(hook.remove)
        installed.callback(setattr, nn.init, "_no_grad_trunc_normal_", nn.init._no_grad_trunc_normal_)
        nn.init._no_grad_trunc_normal_ = recorder.recorded_trunc_normal(nn.init._no_grad_trunc_normal_)
        installed.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(derive_key(seed, "construction") >> 1)
        installed.enter_context(recorder)
        installed.enter_context(_PretendCPU(recorder.tape))
        yield recorder.tape


class InitRecorder(TorchDispatchMode):
    """Turns parameters into meta tensors as they are registered; records operations on them on `tape`."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.tape = InitTape()
        self._thread = thread
        self._labels: dict[int, str] = {}  # "Linear.weight"; the name in the model is not known yet
        self._blank: dict[int, StorageWeakRef] = {}  # a weak reference keeps the id from being reused
        self._taken_over: dict[int, tuple[StorageWeakRef, str]] = {}

    def on_register_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Makes `param` a meta tensor, keeping the object; torch calls it as `param` is registered."""
        if threading.get_ident() != self._thread:
            return
        label = f"{type(module).__name__}.{name}"
        if isinstance(param, UninitializedParameter):
            fix = "give the layer its input size (nn.Linear instead of nn.LazyLinear)"
            raise PlanError("a lazy parameter has no shape before the first forward", fix=fix, location=label)
        if not self.tape.holds(param):
            self._take_over(label, param)
        self._labels[storage_id(param)] = label

    def _take_over(self, label: str, param: nn.Parameter) -> None:
        value = param.data
        if is_meta(value) or value.layout != torch.strided:
            what = (
                "the parameter is "
                f"{'a meta tensor made elsewhere' if is_meta(value) else f'of layout {value.layout}'}"
            )
            raise PlanError(
                what, fix="make the parameter in the constructor, as an ordinary dense tensor", location=label
            )
        number = storage_id(value)
        if number in self._taken_over:
            self._refuse_shared(label, self._taken_over[number][1])
        self._taken_over[number] = (StorageWeakRef(value.untyped_storage()), label)
        meta = torch.empty_like(value, device=META)
        self.tape.add_storage(meta, None if number in self._blank else _compress_constant(value))
        twin = torch.Tensor._make_subclass(type(param), meta, param.requires_grad)
        vars(twin).update(vars(param))
        try:
            torch.utils.swap_tensors(param, twin)
        except RuntimeError as error:
            fix = "register the parameter before taking views or weak references of it"
            raise PlanError(
                "another object already refers to the parameter when it is registered",
                fix=fix,
                location=label,
            ) from error

    def recorded_trunc_normal(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Returns an initializer that records on the tape for its parameters; other tensors go to
        `original`.
        """

        def trunc_normal(
            tensor: torch.Tensor,
            mean: float,
            std: float,
            a: float,
            b: float,
            generator: torch.Generator | None = None,
        ) -> torch.Tensor:
            if threading.get_ident() != self._thread or not self.tape.holds(tensor):
                return original(tensor, mean, std, a, b, generator=generator)
            window = StorageWindow.from_tensor(tensor)
            one = frozenset([window.storage])
            self.tape.append(
                TapeEntry(
                    truncated_normal_,
                    (window, mean, std, a, b),
                    {},
                    one,
                    one,
                    overwritten_storage=self._overwritten_storage(window),
                )
            )
            return tensor

        return trunc_normal

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = list(_written_tensors(func, args, kwargs))
        if any(map(is_meta, tensors)) or kwargs.get("device") == META:
            return self._record(func, args, kwargs, tensors, written)
        for tensor in written:
            if tensor.layout == torch.strided:
                self._blank.pop(storage_id(tensor), None)
                if storage_id(tensor) in self._taken_over:
                    self._refuse_shared(
                        f"the tensor written by {func}", self._taken_over[storage_id(tensor)][1]
                    )
        blank = find_op(func.overloadpacket.__name__).is_uninitialized
        result = _allocate_lazily(func, args, kwargs) if blank else func(*args, **kwargs)
        if blank:
            self._blank[storage_id(result)] = StorageWeakRef(result.untyped_storage())
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], written: list[torch.Tensor]
    ) -> Any:
        self._check(func, tensors, written)
        if func == aten._to_copy.default:
            kwargs = {
                **kwargs,
                "device": META,
            }  # `model.to(device)` in a factory: the device is not decided here
        indexing = func.overloadpacket in (aten.index_put_, aten.index_put, aten.index, aten.copy_)

        def on_meta(leaf: object) -> object:
            real = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and not is_meta(leaf) and not indexing
            return torch.empty_like(leaf, device=META) if real else leaf

        result = func(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        windows = tuple(
            None if self.tape.holds(tensor) else self.tape.add_storage(tensor) for tensor in results
        )
        blank = find_op(func.overloadpacket.__name__).is_uninitialized
        if written or (any(windows) and not blank):
            writes = [storage_id(tensor) for tensor in written] + [
                window.storage for window in windows if window
            ]
            reads = [storage_id(tensor) for tensor in tensors if is_meta(tensor)]
            forgets = (
                self._overwritten_storage(StorageWindow.from_tensor(written[0]))
                if func in OVERWRITING_OPS
                else None
            )
            frozen_args, frozen_kwargs = tree_map(_freeze_argument, args), tree_map(_freeze_argument, kwargs)
            self.tape.append(
                TapeEntry(
                    func, frozen_args, frozen_kwargs, frozenset(reads), frozenset(writes), windows, forgets
                )
            )
        return result

    def _check(self, func: Any, tensors: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        where = ", ".join(
            self._labels[storage_id(t)] for t in tensors if is_meta(t) and storage_id(t) in self._labels
        )
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            what = (
                f"the constructor reads the value of a parameter ({func}), and parameters have no values "
                "during construction"
            )
            fix = "compute what you need from shapes and settings, or from a tensor that is not a parameter"
            raise PlanError(what, fix=fix, location=where)
        draws = torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is aten.random_
        if draws and func not in RANDOM_OPS:
            fix = (
                "use normal_, uniform_ or torch.nn.init.trunc_normal_, or draw into an ordinary tensor and "
                "copy_ that"
            )
            raise PlanError(f"{func} on a parameter cannot be replayed", fix=fix, location=where)
        if not all(map(is_meta, written)):
            what = (
                f"the constructor writes the value of a parameter into an ordinary tensor or buffer ({func})"
            )
            raise PlanError(
                what,
                fix="fill the buffer from numbers that are not parameters, or in the first forward",
                location=where,
            )

    def _overwritten_storage(self, window: StorageWindow) -> int | None:
        is_complete = torch.Size(window.size).numel() == self.tape.origins[window.storage].numel
        return window.storage if is_complete else None

    def _refuse_shared(self, where: str, other: str) -> Never:
        what = f"shares its memory with {other}, which became a parameter of its own"
        raise PlanError(
            what, fix="register one nn.Parameter object under both names, or clone the tensor", location=where
        )


class _PretendCPU(TorchFunctionMode):
    """While active, tensors of the tape answer `is_meta` with False and `device` with cpu."""

    def __init__(self, tape: InitTape) -> None:
        super().__init__()
        self._tape = tape
        self._answers = {_tensor_getter("is_meta"): False, _tensor_getter("device"): CPU}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self._answers and self._tape.holds(args[0]):
            return self._answers[func]
        return func(*args, **(kwargs or {}))


def _allocate_lazily(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The result of `func`, an uninitialized allocation; a large one on pages that exist once written to.

    The experts of one layer of a 670 B model are a tensor of 30 GB, which becomes a parameter, and so meta,
    immediately afterwards. torch's own allocator asks for all of it at once, and a system with less memory
    refuses.
    """
    shape = func(*args, **{**kwargs, "device": META, "pin_memory": False})
    nbytes = shape.untyped_storage().nbytes()
    if (
        nbytes < LARGE_NBYTES
        or shape.layout != torch.strided
        or torch.device(kwargs.get("device") or CPU) != CPU
    ):
        return func(*args, **kwargs)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=shape.dtype).as_strided(shape.shape, shape.stride())


def _tensor_getter(attribute: str) -> Any:
    """The function that a mode receives when `attribute` of a tensor is read."""
    return vars(torch._C.TensorBase)[attribute].__get__


def is_meta(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` has no storage; asks the storage, because a recorded tensor reports the device
    CPU.
    """
    return tensor.layout == torch.strided and tensor.untyped_storage().device == META


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            argument_value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(argument_value) if isinstance(leaf, torch.Tensor))


def _freeze_argument(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return StorageWindow.from_tensor(leaf) if is_meta(leaf) else leaf.detach().clone()


def _compress_constant(value: torch.Tensor) -> torch.Tensor:
    """`value`, or one number if all its elements are equal: torch.ones(10**9) is kept in four bytes."""
    if value.numel() > 1:
        first = value[(0,) * value.dim()]
        if bool((value == first).all()):
            return first.clone()
    return value
