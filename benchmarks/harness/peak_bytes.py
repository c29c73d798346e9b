"""The most bytes of tensor storages that live at any moment, on one thread: those that autograd alone holds,
too.

    with PeakLive(module.parameters()) as live:        # what was made before
        engine.step(batch)
    live.peak

Every operation is looked at when it has run: what it made is noted, and what has been freed since is
forgotten. Scratch memory that an operation takes and gives back within itself is not seen, nor is what other
threads make. With a `limit` it is an allocator that has no more: the operation that goes beyond it fails.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakLive(TorchDispatchMode):
    """While active, `now` are the live bytes of `known` and of all that was made since, and `peak` is the
    most of them.

    Raises MemoryError as soon as more than `limit` bytes live; 0: any number may.
    """

    def __init__(self, known: Iterable[torch.Tensor] = (), limit: int = 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.limit = limit
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in known:
            self._note(tensor)
        self._look()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
                self._note(tensor)
        self._look()
        return out

    def again(self) -> None:
        """Forget the peak, not what lives."""
        self._look()
        self.peak = self.now

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        before = self._live.get(storage._cdata)
        if before is None or before[0].expired():
            self.now += storage.nbytes() - (before[1] if before else 0)
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def _look(self) -> None:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self.now -= self._live.pop(key)[1]
        self.peak = max(self.peak, self.now)
        if self.limit and self.now > self.limit:
            raise MemoryError(f"{self.now:,} bytes live, and there are {self.limit:,}")
