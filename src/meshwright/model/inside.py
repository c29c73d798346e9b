"""How much a visit computes within that its backward needs: what autograd saves there, storage by storage.

Not counted are weights and buffers, what the visit was given, and what it hands on: those are held anyway. Two tensors that share
memory count once, and what several visits save was made by none of them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

MASK = 4  # bytes that count as one element, of tensors that are no numbers to compute with: masks, indices


class Inside:
    """Notes what is saved; `where()` tells the visit that runs, "" between blocks."""

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where
        self._saved: dict[
            int, tuple[torch.UntypedStorage, float, set[str]]
        ] = {}  # the storage is kept, so its address is its own
        self._outside: dict[int, torch.UntypedStorage] = {}

    def watching(self) -> AbstractContextManager:
        """Meanwhile, note what is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count what lies in the memory of `tensors`."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue  # a sparse one has no memory of its own to point to
            storage = tensor.untyped_storage()
            self._outside[storage._cdata] = storage

    def numel(self, visits: Sequence[str]) -> list[int]:
        """The elements within each of `visits`, over all samples."""
        total = dict.fromkeys(visits, 0.0)
        for key, (_, numel, users) in self._saved.items():
            if key not in self._outside and len(users) == 1:
                (user,) = users
                total[user] = total.get(user, 0.0) + numel
        return [round(total[visit]) for visit in visits]

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # an output that its own graph held would hold the graph, for good
        if tensor.layout != torch.strided:
            return kept
        storage = tensor.untyped_storage()
        numel = storage.nbytes() / (tensor.itemsize if tensor.is_floating_point() else MASK)
        self._saved.setdefault(storage._cdata, (storage, numel, set()))[2].add(self._where())
        return kept
