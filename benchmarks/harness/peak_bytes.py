"""The peak bytes of tensor storages, including those that only autograd holds, or a communication thread.

    with PeakLive(module.parameters()) as live:        # tensors that exist already
        engine.step(batch)
    live.peak

After every operation, the storages of its tensors are counted, and storages that were freed are subtracted.
Scratch memory that an operation allocates and frees within itself is not counted, nor are the tensors of
other threads than this one and those of groups that run rounds beside it (comm/backends/comm_thread.py).
With a `limit` it acts as an allocator without more memory: the operation that exceeds it
fails.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from threading import Lock
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.backends.comm_thread import CommThread
from meshwright.comm.collectives.group import Work


class PeakLive(TorchDispatchMode):
    """While active, `now` are the live bytes of `known` and of all tensors made since, and `peak` is their
    maximum, without the storages of `on_disk`, mapped files.

    Raises MemoryError as soon as more than `limit` bytes live; 0: no limit.
    """

    def __init__(
        self, known: Iterable[torch.Tensor] = (), limit: int = 0, on_disk: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()
        self._on_disk = {each.untyped_storage()._cdata: each for each in on_disk}
        self.now = self.peak = 0
        self.limit = limit
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock, self._patched = Lock(), ExitStack()
        for tensor in known:
            self._count_storage(tensor)
        self._update_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._count(args, kwargs, out)
        return out

    def __enter__(self) -> Self:
        submit = CommThread.submit

        def counting_submit(thread: CommThread, function: Callable[[], None]) -> Work:
            def counted() -> None:
                with _OnOtherThread(self._count):
                    function()

            return submit(thread, counted)

        self._patched.enter_context(patch.object(CommThread, "submit", counting_submit))
        return super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._patched.close()

    def reset_peak(self) -> None:
        """Sets the peak to the bytes that live now."""
        with self._lock:
            self._update_peak()
            self.peak = self.now

    def _count(self, *operands: object) -> None:
        """Counts the tensors in the operands and results of an operation."""
        with self._lock:
            for tensor in tree_leaves(operands):
                if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                    self._count_storage(tensor)
            self._update_peak()

    def _count_storage(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or storage._cdata in self._on_disk:  # a fake tensor's is meta, too
            return
        before = self._live.get(storage._cdata)
        if before is None or before[0].expired():
            self.now += storage.nbytes() - (before[1] if before else 0)
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _update_peak(self) -> None:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self.now -= self._live.pop(key)[1]
        self.peak = max(self.peak, self.now)
        if self.limit and self.now > self.limit:
            raise MemoryError(f"{self.now:,} bytes live, and there are {self.limit:,}")


class _OnOtherThread(TorchDispatchMode):
    """Tells `count` the operands and results of each operation of a thread; a mode is of one thread."""

    def __init__(self, count: Callable[..., None]) -> None:
        super().__init__()
        self._tell = count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._tell(args, kwargs, out)
        return out
