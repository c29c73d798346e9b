"""How much a visit computes within that its backward needs: what autograd saves there, storage by storage.

Not counted are weights and buffers, what the visit was given, and what it hands on: those are held anyway. Two tensors that share
memory count once, and what several visits save was made by none of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

MASK_NBYTES = (
    4  # bytes that count as one element, of tensors that are no numbers to compute with: masks, indices
)


@dataclass
class _StorageUse:
    """What was saved, when first, and by which visits; it is kept meanwhile, so its address is its own."""

    storage: torch.UntypedStorage
    numel: float
    when: int
    users: set[str] = field(default_factory=set)


class SavedActivations:
    """Notes what is saved; `where()` tells the visit that runs, "" between blocks, and `when()` counts on."""

    def __init__(self, current_call: Callable[[], str], clock: Callable[[], int] = lambda: 0) -> None:
        self._current_call, self._clock = current_call, clock
        self._saved: dict[int, _StorageUse] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}

    def recording(self) -> AbstractContextManager:
        """Meanwhile, note what is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count what lies in the memory of `tensors`."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue  # a sparse one has no memory of its own to point to
            storage = tensor.untyped_storage()
            self._outside[storage._cdata] = storage

    def numel(self, block_calls: Sequence[str]) -> list[int]:
        """The elements within each of `visits`, over all samples."""
        total = dict.fromkeys(block_calls, 0.0)
        for each in self._single_user_storages():
            (user,) = each.users
            total[user] = total.get(user, 0.0) + each.numel
        return [round(total[visit]) for visit in block_calls]

    def saved_storages(self) -> list[tuple[int, int, float]]:
        """Of each storage within a visit when it was first saved, which one it is, and its elements, over all samples."""
        return [(each.when, each.storage._cdata, each.numel) for each in self._single_user_storages()]

    def _single_user_storages(self) -> Iterator["_StorageUse"]:
        return (
            each for key, each in self._saved.items() if key not in self._outside and len(each.users) == 1
        )

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # an output that its own graph held would hold the graph, for good
        if tensor.layout != torch.strided:
            return kept
        storage = tensor.untyped_storage()
        numel = storage.nbytes() / (tensor.itemsize if tensor.is_floating_point() else MASK_NBYTES)
        self._saved.setdefault(storage._cdata, _StorageUse(storage, numel, self._clock())).users.add(
            self._current_call()
        )
        return kept
