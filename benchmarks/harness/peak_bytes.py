"""The peak bytes of tensor storages on one thread, including those that only autograd holds.

    with PeakLive(module.parameters()) as live:        # tensors that exist already
        engine.step(batch)
    live.peak

After every operation, the storages of its tensors are counted, and storages that were freed are subtracted.
Scratch memory that an operation allocates and frees within itself is not counted, nor are the tensors of
other threads. With a `limit` it acts as an allocator without more memory: the operation that exceeds it
fails.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
        for tensor in known:
            self._count_storage(tensor)
        self._update_peak()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._count_storage(tensor)
        self._update_peak()
        return out

    def reset_peak(self) -> None:
        """Sets the peak to the bytes that live now."""
        self._update_peak()
        self.peak = self.now

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
