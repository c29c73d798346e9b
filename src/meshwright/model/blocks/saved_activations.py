"""Counts what autograd saves inside each block call, storage by storage.

Weights and buffers, inputs and outputs of the block call are excluded, because they are kept anyway. Two
tensors that share memory count once. What several block calls save was made by none of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshwright.model.recording.forward_recording import ModuleStart, Recording, SavedTensor, tensor_records

MASK_NBYTES = 4  # bytes that count as one element, for tensors that are not floating-point: masks, indices


@dataclass
class _StorageUse:
    """A saved storage, when it was first saved, and by which block calls."""

    numel: float
    when: int
    users: set[str] = field(default_factory=set)


class SavedActivations:
    """What autograd saved in a recorded forward, without `kept_storages`; a time is the index of an event."""

    def __init__(self, recording: Recording, kept_storages: Iterable[int] = ()) -> None:
        self._saved: dict[int, _StorageUse] = {}
        self._kept = {*kept_storages}
        blocks = frozenset(recording.blocks)
        for when, event in enumerate(recording.events):
            if type(event) is SavedTensor and event.tensor.is_strided:
                self._note(event, when)
            elif type(event) is ModuleStart and event.name in blocks:
                self._kept.update(each.storage for each in tensor_records((event.args, event.kwargs)))

    def numel(self, block_calls: Sequence[str]) -> list[int]:
        """Returns the elements saved inside each of `block_calls`, over all samples."""
        total = dict.fromkeys(block_calls, 0.0)
        for _, each in self._single_user_storages():
            (user,) = each.users
            total[user] = total.get(user, 0.0) + each.numel
        return [round(total[block_call]) for block_call in block_calls]

    def saved_storages(self) -> list[tuple[int, int, float]]:
        """Returns, for each storage saved in a block call: time of first save, storage, elements of all
        samples.
        """
        return [(each.when, storage, each.numel) for storage, each in self._single_user_storages()]

    def _single_user_storages(self) -> Iterator[tuple[int, _StorageUse]]:
        return (
            (key, each) for key, each in self._saved.items() if key not in self._kept and len(each.users) == 1
        )

    def _note(self, event: SavedTensor, when: int) -> None:
        tensor = event.tensor
        itemsize = tensor.dtype.itemsize if tensor.dtype.is_floating_point else MASK_NBYTES
        numel = tensor.storage_nbytes / itemsize
        self._saved.setdefault(tensor.storage, _StorageUse(numel, when)).users.add(event.block_call)
