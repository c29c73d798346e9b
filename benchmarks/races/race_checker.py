"""Finds races between streams on fake CUDA tensors, without a GPU.

While active (`with`), every operation is an access of the memory of its operands on the current stream; the
device guard says what streams, events and synchronizations order (fake_streams.py).

    an operation                    reads its operands, writes its results and what it changes in place
    a view, an empty tensor         accesses nothing
    .item(), .cpu()                 reads, and the host waits for the stream
    .to(device, non_blocking)       reads or writes pinned host memory on the stream; the host goes on
    an operation on pinned memory   an access of the host
    a tensor that is freed          its memory belongs to the next allocation on the stream that allocated it

Limits: all host threads count as one; random generators, and memory that no tensor holds, are not seen; an
operation that synchronizes inside (`nonzero`) counts as one that does not.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.result import ROOT
from benchmarks.races.fake_streams import (
    BLOCK,
    DEVICE,
    FREED,
    RECORD,
    SYNC_EVENT,
    SYNC_STREAM,
    StreamLog,
    cuda_streams,
)
from benchmarks.races.memory_accesses import Access, Frame, FreedMemory, Memory, Race, Region, Site
from benchmarks.races.vector_clocks import HOST, VectorClocks

aten = torch.ops.aten
ALLOCATIONS = frozenset(
    {"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"}
)
OWN_FOLDER = os.path.dirname(__file__)


class _Operands(NamedTuple):
    """Where an operation has operands that it changes in place: positions, and names."""

    positions: frozenset[int]
    names: frozenset[str]


class RaceChecker(TorchDispatchMode):
    """While active, collects the `races` of the operations on fake CUDA tensors, each pair of lines once.

    `action` returns the name of the action of the program that is under way. Needs a process of
    `run_with_fake_cuda`, and to be entered after other modes, so that it sees what they answer.
    """

    def __init__(self, action: Callable[[], str] = lambda: "") -> None:
        super().__init__()
        self.races: list[Race] = []
        self.num_accesses = 0
        self._action, self._log, self._clocks = action, StreamLog(), VectorClocks()
        self._memories: dict[int, Memory] = {}  # by the address of the storage
        self._watched: dict[int, int] = {}  # the address, by the number of the storage in the log
        self._kept: list[torch.UntypedStorage] = []  # pinned memory with values
        self._freed = FreedMemory()
        self._known: set[object] = set()
        self._operands: dict[Any, _Operands] = {}
        self._is_shown: dict[CodeType, str] = {}
        self._streams: AbstractContextManager[None] = cuda_streams()

    def __enter__(self) -> Self:
        self._streams.__enter__()
        super().__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._streams.__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is aten.record_stream:
            self._read_log()
            self._memory_of(args[0]).recorded_streams.add(args[1].stream_id)
            return None
        if packet in (aten._pin_memory, aten.is_pinned):
            return self._pin(args[0]) if packet is aten._pin_memory else self._is_pinned(args[0])
        pins = bool(kwargs.get("pin_memory"))
        out = func(*args, **{**kwargs, "pin_memory": False} if pins else kwargs)
        self._read_log()
        if pins:
            self._memory_of(out, HOST)
        if not func.is_view:
            self._note_operation(func, args, kwargs, out)
        return out

    def access(
        self, operation: str, *, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Notes what work on the current stream accesses that is no operation of torch: a collective."""
        self._read_log()
        stream, site = _current_stream(), self._site(operation)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._note(tensor, stream, is_write, site)

    def _note_operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_) and self._note_copy(func, args, kwargs, out):
            return
        changed, read = self._split_operands(func, args, kwargs)
        inputs = {each.untyped_storage()._cdata for each in (*changed, *read)}
        results = [each for each in _tensors((out,)) if each.untyped_storage()._cdata not in inputs]
        if not changed and not results and func._schema.returns and packet is not aten._local_scalar_dense:
            return  # a view by another name
        devices = {each.device.type for each in (*changed, *read, *results)}
        if DEVICE.type not in devices:
            self._note_on_host(func, changed, read)
            return
        stream, site = _current_stream(), self._site(str(packet))
        for tensor in results:
            if tensor.device.type == DEVICE.type:
                self._allocate(tensor, stream, site)
        if packet.__name__ in ALLOCATIONS:
            return
        if packet.__name__.endswith("_like") or packet.__name__.startswith("new_"):
            read = []  # its shape alone
        for tensors, is_write in ((read, False), ((*changed, *results), True)):
            for tensor in tensors:
                if tensor.device.type == DEVICE.type:
                    self._note(tensor, stream, is_write, site)
        if packet is aten._local_scalar_dense:
            self._clocks.synchronize_stream(stream)

    def _note_copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> bool:
        """Notes a copy between the host and the device; returns whether it is one."""
        is_new = func.overloadpacket is aten._to_copy
        source, target = (args[0], out) if is_new else (args[1], args[0])
        if source.device.type == target.device.type:
            return False
        non_blocking = kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2])
        to_host = target.device.type != DEVICE.type
        if is_new and to_host and non_blocking:
            self._memory_of(target, HOST)  # torch pins it
        stream, site = (
            _current_stream(),
            self._site(f"{func.overloadpacket} to the {'host' if to_host else 'device'}"),
        )
        if is_new and not to_host:
            self._allocate(target, stream, site)
        host = target if to_host else source
        for tensor, is_write in ((source, False), (target, True)):
            if tensor is not host or self._is_pinned(host):
                self._note(tensor, stream, is_write, site)
        if not non_blocking or (to_host and not self._is_pinned(host)):
            self._clocks.synchronize_stream(stream)
        return True

    def _note_on_host(self, func: Any, changed: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
        for tensors, is_write in ((read, False), (changed, True)):
            for tensor in filter(self._is_pinned, tensors):
                self._note(tensor, HOST, is_write, self._site(str(func.overloadpacket)))

    def _note(self, tensor: torch.Tensor, process: int, is_write: bool, site: Site) -> None:
        if not tensor.numel():
            return
        memory = self._memory_of(tensor)
        epoch = self._clocks.host_epoch() if process == HOST else self._clocks.launch(process)
        region = Region.of_view(
            int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor.itemsize
        )
        self.num_accesses += 1
        self._report(memory.add(Access(process, epoch, region, is_write, site), self._clocks))

    def _allocate(self, tensor: torch.Tensor, stream: int, site: Site) -> None:
        self._memory_of(tensor, stream)
        self._report(self._freed.reuse(stream, self._clocks, site))

    def _memory_of(self, tensor: torch.Tensor, owner: int = 0) -> Memory:
        """Returns the memory of a tensor; a new one belongs to `owner`."""
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(owner)
            if isinstance(tensor, FakeTensor):
                self._watched[self._log.watch(storage)] = storage._cdata
            else:
                self._kept.append(storage)  # its address stays its own
        return memory

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.owner == HOST

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor.clone()
        self._memory_of(pinned, HOST)
        return pinned

    def _read_log(self) -> None:
        for kind, subject, stream in self._log.take():
            if kind == RECORD:
                self._clocks.record(subject, stream)
            elif kind == BLOCK:
                self._clocks.wait_event(subject, stream)
            elif kind == SYNC_EVENT:
                self._clocks.synchronize_event(subject)
            elif kind == SYNC_STREAM:
                self._clocks.synchronize_stream(stream)
            elif kind == FREED:
                self._free(subject)
            else:
                self._clocks.synchronize_device()

    def _free(self, number: int) -> None:
        memory = self._memories.pop(self._watched.pop(number, 0), None)
        if memory is not None and memory.owner != HOST:
            unordered = memory.unordered_at_reuse(self._clocks)
            if unordered:
                self._freed.add(memory.owner, unordered)

    def _report(self, races: Iterator[Race]) -> None:
        for race in races:
            if race.key not in self._known:
                self._known.add(race.key)
                self.races.append(race)

    def _split_operands(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the operands that `func` changes, and those that it reads."""
        operands = self._operands.get(func)
        if operands is None:
            changed = [
                (i, each.name)
                for i, each in enumerate(func._schema.arguments)
                if each.alias_info is not None and each.alias_info.is_write
            ]
            operands = _Operands(frozenset(i for i, _ in changed), frozenset(name for _, name in changed))
            self._operands[func] = operands
        split: tuple[list[Any], list[Any]] = [], []
        for i, value in enumerate(args):
            split[i not in operands.positions].append(value)
        for name, value in kwargs.items():
            split[name not in operands.names].append(value)
        return list(_tensors(split[0])), list(_tensors(split[1]))

    def _site(self, operation: str) -> Site:
        frames: list[Frame] = []
        frame = sys._getframe(2)
        while frame is not None:
            path = self._is_shown.get(frame.f_code)
            if path is None:
                path = self._is_shown[frame.f_code] = _shown_path(frame.f_code)
            if path:
                frames.append((path, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        node = torch._C._current_autograd_node()
        return Site(
            operation if node is None else f"{operation} of {node.name()}", self._action(), tuple(frames)
        )


def _current_stream() -> int:
    return torch.accelerator.current_stream().stream_id


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _shown_path(code: CodeType) -> str:
    """Returns the path to show for the frames of `code`; "" for those of torch, Python and this package."""
    path = Path(code.co_filename)
    if code.co_filename.startswith(OWN_FOLDER) and path.name in ("race_checker.py", "fake_process_group.py"):
        return ""
    if "site-packages" in path.parts or code.co_filename.startswith((sys.base_prefix, "<frozen")):
        return ""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else code.co_filename
