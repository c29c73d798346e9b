"""Moves what block calls keep for their backward through buffers of the host into a file, and back.

    device          OFFLOAD ->   buffer of the host   -> WRITE   file          (a record for each block call)
    device          <- FETCH     another buffer       <- READ    file

A record has the tensors one behind the other, wide dtypes first, and the rest of a block. It takes the first
gap of the file that is large enough, and leaves it once its read was started: the thread of the file moves
one after another, so what is written there later comes later. The file has the size that the plan states; a
step that keeps more (a longer batch, more rows of an expert) makes it longer, or finds that the disk is full.

While a tensor is in the file it has no memory: a backward that reads it too early meets an error.
"""

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.group import Work
from meshwright.parallel.memory.tiers.kept_tensor_copies import Kept, KeptTensorCopies, Key
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.step.memory.activation_copies import OFFLOAD
from meshwright.plan.step.memory.activation_files import READ, WRITE, activation_nbytes
from meshwright.plan.step.program import Action

if TYPE_CHECKING:
    from meshwright.engine.runtime.rank_state import RankState

LOCATION = "strategies.activation_offload.folder"


class FileRanges:
    """The ranges of a file that are taken: each lies in the first gap that is large enough."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # by begin

    def take(self, nbytes: int) -> int:
        """Returns where a new range of `nbytes` begins."""
        begin = 0
        for taken in sorted(self._ends):
            if taken - begin >= nbytes:
                break
            begin = self._ends[taken]
        self._ends[begin] = begin + nbytes
        return begin

    def give(self, begin: int) -> None:
        """Frees the range that begins there."""
        del self._ends[begin]

    def clear(self) -> None:
        """Frees all."""
        self._ends.clear()


@dataclass(frozen=True)
class _Place:
    """The place of a kept tensor in the record of its block call; nobody here keeps the tensor alive."""

    kept: weakref.ref[Kept]
    begin: int
    numel: int
    dtype: torch.dtype

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in a buffer that holds the record, as one vector."""
        return buffer[self.begin : self.begin + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass
class _Record:
    """What a block call keeps, in `buffer` or, from `begin` on, in the file; `nbytes` are whole blocks."""

    places: tuple[_Place, ...]
    nbytes: int
    buffer: torch.Tensor
    copy: Work
    begin: int = 0


@dataclass
class _Buffers:
    """Buffers of the host by the names of their allocations; what copies out of them is in `copies`."""

    state: "RankState"
    like: torch.Tensor
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, Work] = field(default_factory=dict)

    def get(self, action: Action, nbytes: int) -> torch.Tensor:
        """Returns `nbytes` of the buffer that `action` allocates."""
        (allocation,) = action.allocations
        known = self.memory.get(allocation.name)
        if known is None or known.numel() < nbytes:
            known = self.state.host_memory.file_buffer(max(nbytes, allocation.nbytes), self.like)
            self.memory[allocation.name] = known
        return known[:nbytes]


class KeptTensorFile(KeptTensorCopies):
    """Handles the copies of activations of one rank that rest in its file."""

    def __init__(self, state: "RankState") -> None:
        super().__init__(state)
        actions = state.plan.actions
        self._first = next((each.name for each in actions if each.kind == OFFLOAD), "")
        self._records: dict[Key, _Record] = {}
        self._ranges = FileRanges()
        like = next(iter(state.trained_module.parameters.values())).detach().new_empty(0)
        self._buffers, self._file = _Buffers(state, like), None
        nbytes = activation_nbytes(actions, "disk")
        if nbytes and not isinstance(like, FakeTensor):
            self._file = state.make_file(nbytes, LOCATION)
        self.handlers |= {WRITE: self.write, READ: self.read}

    @torch.no_grad()
    def offload(self, action: Action) -> None:
        """Starts to copy what a block call keeps into a buffer; its device memory is free behind the copy."""
        if action.name == self._first:
            self._records.clear()  # of a step that failed; the file moves its last ones before any new one
            self._ranges.clear()
        places, end = list[_Place](), 0
        with torch._C.DisableTorchFunction():
            found = sorted(self.kept_tensors(action), key=lambda each: -each.flat.element_size())
            sources = [each.flat for each in found]
            for kept, source in zip(found, sources, strict=True):
                places.append(_Place(weakref.ref(kept), end, source.numel(), source.dtype))
                end += source.nbytes
            nbytes = round_up(end, FILE_BLOCK_NBYTES)
            buffer = self._buffers.get(action, nbytes)
            targets = [place.view(buffer) for place in places]
            pairs = list(zip(targets, sources, strict=True))
            copy = self._state.host_memory.start_copies(action, pairs, read_on_host=False)
            for kept in found:
                kept.leave()
        record = _Record(tuple(places), nbytes, buffer, copy)
        self._records[action.subject, action.microbatch] = record
        self._state.issue(action, CompletedWork())  # the thread of the file waits for the copy itself

    def write(self, action: Action) -> None:
        """Starts to write the buffer into the file."""
        record = self._records[action.subject, action.microbatch]
        self._state.world.ledger.record_copy(action.name, record.nbytes)
        work: Work = CompletedWork()
        if record.nbytes:
            record.begin = self._ranges.take(record.nbytes)
            if self._file is not None:
                self._file.grow(record.begin + record.nbytes)
                after = self._state.host_memory.end_of(record.copy)
                work = self._file.start_write(record.begin, record.buffer, action.name, after)
        self._state.issue(action, work)

    def read(self, action: Action) -> None:
        """Starts to read the record of a block call into a buffer, once that is copied to the device."""
        record = self._records[action.subject, action.microbatch]
        self._state.world.ledger.record_copy(action.name, record.nbytes)
        work: Work = CompletedWork()
        if record.nbytes:
            self._ranges.give(record.begin)
            record.buffer = self._buffers.get(action, record.nbytes)
            if self._file is not None:
                copy = self._buffers.copies.pop(action.allocations[0].name, None)
                after = self._state.host_memory.end_of(copy)
                work = self._file.start_read(record.begin, record.buffer, action.name, after)
        self._state.issue(action, work)

    @torch.no_grad()
    def fetch(self, action: Action) -> None:
        """Starts to copy the buffer back to the device."""
        device, pairs = self._state.world.device, list[tuple[torch.Tensor, torch.Tensor]]()
        record = self._records.pop((action.subject, action.microbatch))
        alive = self.kept_tensors(action, forget=True)
        with torch._C.DisableTorchFunction():
            for place in record.places:
                kept, source = place.kept(), place.view(record.buffer)
                if kept in alive:
                    target = source.new_empty(source.shape, device=device)
                    pairs.append((target, source))
                    kept.move(target, to_host=False)
            work = self._state.host_memory.start_copies(action, pairs)
        self._buffers.copies[action.frees[0]] = work
        self._state.issue(action, work)
