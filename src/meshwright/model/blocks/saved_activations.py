"""Counts what autograd saves inside each block call, storage by storage.

Weights and buffers, inputs and outputs of the block call are excluded, because they are kept anyway. Two
tensors that share memory count once. What several block calls save was made by none of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

MASK_NBYTES = 4  # bytes that count as one element, for tensors that are not floating-point: masks, indices


@dataclass
class _StorageUse:
    """A saved storage, when it was first saved, and by which block calls; kept alive, so its id is unique."""

    storage: torch.UntypedStorage
    numel: float
    when: int
    users: set[str] = field(default_factory=set)


class SavedActivations:
    """Records what autograd saves; `current_call()` is the block call or "", `clock()` a time."""

    def __init__(self, current_call: Callable[[], str], clock: Callable[[], int] = lambda: 0) -> None:
        self._current_call, self._clock = current_call, clock
        self._saved: dict[int, _StorageUse] = {}
        self._outside: dict[int, torch.UntypedStorage] = {}

    def recording(self) -> AbstractContextManager:
        """Context manager: records what is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)

    def exclude(self, tensors: Iterable[torch.Tensor]) -> None:
        """Does not count the memory of `tensors`."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue  # a sparse tensor has no single storage
            storage = tensor.untyped_storage()
            self._outside[storage._cdata] = storage

    def numel(self, block_calls: Sequence[str]) -> list[int]:
        """Returns the elements saved inside each of `block_calls`, over all samples."""
        total = dict.fromkeys(block_calls, 0.0)
        for each in self._single_user_storages():
            (user,) = each.users
            total[user] = total.get(user, 0.0) + each.numel
        return [round(total[block_call]) for block_call in block_calls]

    def saved_storages(self) -> list[tuple[int, int, float]]:
        """Returns, for each storage saved in a block call: time of first save, storage id, elements of all
        samples.
        """
        return [(each.when, each.storage._cdata, each.numel) for each in self._single_user_storages()]

    def _single_user_storages(self) -> Iterator["_StorageUse"]:
        return (
            each for key, each in self._saved.items() if key not in self._outside and len(each.users) == 1
        )

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # an output saved by its own graph would keep the graph alive
        if tensor.layout != torch.strided:
            return kept
        storage = tensor.untyped_storage()
        numel = storage.nbytes() / (tensor.itemsize if tensor.is_floating_point() else MASK_NBYTES)
        self._saved.setdefault(storage._cdata, _StorageUse(storage, numel, self._clock())).users.add(
            self._current_call()
        )
        return kept
