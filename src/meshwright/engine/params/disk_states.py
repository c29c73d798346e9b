"""Optimizer states, masters and weights that rest in the file of a rank, in records of parameter groups.

    file      [ record of group 0 | record of group 1 | ... | weights of group 0 | weights of group 1 | ... ]
    record    [ masters | optimizer states, wide dtypes first | rest of a block ]
    weights   [ the shard of this rank | rest of a block ]

    READ_STATES    a record -> a buffer of the host
    OFFLOAD_GRAD   the summed gradients of the group -> a buffer of the host
    STEP           steps tensors in these buffers; the stepped weights go into a buffer, too
    FETCH_PARAM    the stepped weights -> the device
    WRITE_STATES   the buffer -> its record

    READ_PARAM     weights on disk, before each use -> a buffer of the host
    FETCH_PARAM    this buffer -> the range of the shard in the full parameter
    WRITE_PARAM    the stepped weights, in place of FETCH_PARAM after STEP -> the file

Between steps the tensors of the optimizer and the masters are views of the mapped file, so that checkpoints
read and write them as they are; during the STEP of their group they are views of its buffer. The first step
finds no states: READ_STATES reads the masters alone, and WRITE_STATES gives what the optimizer has made its
place in the record. A step that is left out copies and writes nothing. An evaluation reads weights in the
training thread, into one of their buffers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.group import Work
from meshwright.engine.params.offloaded_states import RestingTensor
from meshwright.engine.params.rank_file import LOCATION, load_pages
from meshwright.engine.runtime.cpu_allocator import trim_heap
from meshwright.engine.runtime.host_memory import page_aligned
from meshwright.engine.runtime.rank_state import RankState
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.step.memory.model_states import WIDEST_ITEM_NBYTES
from meshwright.plan.step.program import Action, Allocation
from meshwright.plan.strategy_interface import Handler

# the name of a parameter or of its group, and "master" or the optimizer's name of a state
TensorKey = tuple[str, str]


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the record of its group."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.begin + prod(self.shape) * self.dtype.itemsize

    def view(self, record: torch.Tensor) -> torch.Tensor:
        """Returns the tensor in `record`, or in a buffer that holds the record."""
        return record[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class _WeightRecord:
    """The bytes of the shard of a parameter group in the file, `mapped`, from `begin` on; `buffer` is one
    that they are read into.
    """

    begin: int
    mapped: torch.Tensor
    buffer: Allocation


def _end(places: Iterable[_Place]) -> int:
    """Returns the first byte behind all of `places`."""
    return max((each.end for each in places), default=0)


@dataclass
class _Record:
    """The bytes of one parameter group in the file, `mapped`, from `begin` on, and what lies where in them.

    `action` is one on the group. `buffer` is where the bytes were read to, and `in_buffer` what the optimizer
    finds there, during a step.
    """

    action: Action
    begin: int
    mapped: torch.Tensor
    masters: dict[TensorKey, _Place] = field(default_factory=dict)
    states: dict[TensorKey, _Place] = field(default_factory=dict)
    resting: dict[TensorKey, torch.Tensor] = field(default_factory=dict)
    buffer: torch.Tensor | None = None
    in_buffer: dict[TensorKey, torch.Tensor] = field(default_factory=dict)

    @property
    def used_nbytes(self) -> int:
        """The bytes up to the end of the last tensor, as whole blocks."""
        return round_up(_end((*self.masters.values(), *self.states.values())), FILE_BLOCK_NBYTES)

    def place(self, key: TensorKey) -> _Place:
        """Returns the place of the master or state `key`."""
        return self.masters[key] if key in self.masters else self.states[key]

    def add_master(self, key: TensorKey, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns the place of the master `key` in the file, behind those before it."""
        self._add(self.masters, key, _Place(_end(self.masters.values()), tuple(shape), dtype))
        return self.resting[key]

    def add_states(self, found: Iterable[RestingTensor]) -> None:
        """Gives the states in `found` that have no place theirs."""
        new = (each for each in found if each.key not in self.masters and each.key not in self.states)
        for each in sorted(new, key=lambda each: -each.tensor.element_size()):
            begin = round_up(_end(self.masters.values()), WIDEST_ITEM_NBYTES)
            begin = round_up(max(begin, _end(self.states.values())), each.tensor.element_size())
            self._add(self.states, each.key, _Place(begin, tuple(each.tensor.shape), each.tensor.dtype))

    def _add(self, places: dict[TensorKey, _Place], key: TensorKey, place: _Place) -> None:
        if place.end > len(self.mapped):
            text = f"{' of '.join(reversed(key))} ends at byte {place.end} of the record of "
            raise ValueError(f"{text}{self.action.subject}, and the plan leaves room for {len(self.mapped)}")
        places[key], self.resting[key] = place, place.view(self.mapped)


class DiskStates:
    """The model states of one rank on disk."""

    def __init__(self, state: RankState) -> None:
        self._state, plan = state, state.plan
        # of the kind of the parameters, without their memory, which they give up where they are in shards
        self._like = next(iter(state.trained_module.parameters.values())).detach().new_empty(0)
        reads = [action for action in plan.actions if action.kind == "READ_STATES"]
        uses = {action.tensors: action for action in plan.actions if action.kind == "READ_PARAM"}
        self._group_of = {name: read.subject for read in reads for name in read.tensors}
        self.nbytes, self._file = sum(map(_nbytes, (*reads, *uses.values()))), None
        if isinstance(self._like, FakeTensor) or not self.nbytes:
            mapped = self._like.new_empty(self.nbytes, dtype=torch.uint8, device="cpu")
        else:
            self._file = state.make_file(self.nbytes, LOCATION)
            mapped = self._file.tensor
        self._records = {each.action.subject: each for each in _records(reads, mapped)}
        # the weights of each group, by any of its parameters
        self._weights: dict[str, _WeightRecord] = {}
        begin = sum(map(_nbytes, reads))
        for use in uses.values():
            record = _WeightRecord(begin, mapped[begin : begin + _nbytes(use)], use.allocations[0])
            self._weights |= dict.fromkeys(use.tensors, record)
            begin += _nbytes(use)
        self._is_cached = True  # initial values, in memory of the file system
        self._buffers: dict[str, torch.Tensor] = {}
        self._copies: dict[str, Work] = {}  # out of the buffers of weights
        kinds = ("READ_PARAM", "READ_STATES")
        self._first_read = next((each.name for each in plan.actions if each.kind in kinds), "")
        self.handlers: dict[str, Handler] = {
            "READ_STATES": self.read_states,
            "OFFLOAD_GRAD": self.offload_grads,
            "READ_PARAM": self.read_params,
            "FETCH_PARAM": self.fetch_params,
            "WRITE_PARAM": self.write_params,
            "WRITE_STATES": self.write_states,
        }

    def master(self, param: str, shape: Sequence[int], dtype: torch.dtype, key: str = "") -> torch.Tensor:
        """Returns memory in the file, zeros, for the master of `param`, or of its group if that is `key`."""
        return self._records[self._group_of[param]].add_master((key or param, "master"), shape, dtype)

    def shard(self, param: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns memory in the file, zeros, for the shard of the weights of the group of `param`."""
        return self._weights[param].mapped[: numel * dtype.itemsize].view(dtype)

    def read_shard(self, param: str, shard: torch.Tensor) -> torch.Tensor:
        """Returns what the file has of the weights of the group of `param`, in memory that the next read
        overwrites; `shard` is what `shard` returned.
        """
        record = self._weights[param]
        if self._file is None:
            return shard
        self._drop_cache()
        buffer = self._pinned(record.buffer)[: len(record.mapped)]
        self._file.start_read(record.begin, buffer, "READ_PARAM", self._end_of_copy(record.buffer)).wait()
        return buffer[: shard.nbytes].view(shard.dtype)

    def read_params(self, action: Action) -> None:
        """Starts to read the weights of a group into the buffer that the action allocates."""
        if action.name == self._first_read:
            self._begin_step()
        record, (allocation,) = self._weights[action.tensors[0]], action.allocations
        buffer = self._pinned(allocation)[: len(record.mapped)]
        self._start_transfer(action, record.begin, buffer, self._end_of_copy(allocation))

    def read_states(self, action: Action) -> None:
        """Starts to read the record of a group into the buffer that the action allocates."""
        if action.name == self._first_read:
            self._begin_step()
        record, (allocation,) = self._records[action.subject], action.allocations
        record.buffer = self._page_aligned(allocation)
        self._move(action, record, writes=False)

    def offload_grads(self, action: Action) -> None:
        """Starts to copy the summed gradients of a group into the buffer that the action allocates."""
        store, buffer = self._state.flat_params, self._pinned(action.allocations[0])
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is None:
            store.master_weights.place_host_gradients(action.tensors, buffer)
        else:
            flat_param.place_host_gradient(buffer)
        self._state.offloaded.offload_grads(action)

    def fetch_params(self, action: Action) -> None:
        """Starts to copy the stepped weights of a group to the device, unless the step was left out; or
        those that were read for a use of them.
        """
        flat_param = self._state.flat_params.flat_param_of(action.tensors[0])
        if flat_param is not None and flat_param.shard_is_remote:
            buffer = next(name for name in action.frees if name in self._buffers)
            shard = self._buffers[buffer][: flat_param.shard.nbytes].view(flat_param.shard.dtype)
            pairs = [(flat_param.gather_input, shard)]
            self._copies[buffer] = self._state.host_memory.start_copies(action, pairs)
            self._state.issue(action, self._copies[buffer])
        elif self._state.step.updates:
            self._state.offloaded.fetch_params(action)
        else:
            self._state.issue(action, CompletedWork())

    def write_params(self, action: Action) -> None:
        """Starts to write the stepped weights of a group, unless the step was left out."""
        record, states = self._weights[action.tensors[0]], self._records[action.subject]
        buffers = [self._buffers[name] for name in action.frees]
        stepped = buffers[0] if buffers else states.buffer  # the master, where nothing is rounded
        if self._state.step.updates and stepped is not None:
            self._start_transfer(action, record.begin, stepped[: len(record.mapped)], writes=True)
        else:
            self._state.issue(action, CompletedWork())

    def with_states_in_memory(self, step: Handler) -> Handler:
        """Returns `step` on tensors in the buffer of their group, where they stay until WRITE_STATES."""

        def handle(action: Action) -> None:
            record = self._records[action.subject]
            self._enter_buffer(action, record)
            try:
                step(action)
            except BaseException:
                self._leave_buffer(record, has_failed=True)
                raise

        return handle

    @torch.no_grad()
    def write_states(self, action: Action) -> None:
        """Starts to write the record of a group from its buffer, unless the step was left out."""
        record = self._records[action.subject]
        if self._state.step.updates and record.buffer is not None:
            found = self._state.offloaded.resting(record.action)
            record.add_states(found)
            for each in found:
                if each.tensor is not record.in_buffer.get(each.key):  # the optimizer has made it
                    record.place(each.key).view(record.buffer).copy_(each.tensor)
            self._move(action, record, writes=True)
        else:
            self._state.issue(action, CompletedWork())
        self._leave_buffer(record, has_failed=False)

    def entries_by_group(self, entries: Iterable[str]) -> list[list[str]]:
        """Returns `entries` of a checkpoint, `key/parameter`, by parameter group; others are a group."""
        groups: dict[str, list[str]] = {}
        for entry in entries:
            groups.setdefault(self._group_of.get(entry.partition("/")[2], ""), []).append(entry)
        return list(groups.values())

    @torch.no_grad()
    def adopt_states(self, entries: Iterable[str]) -> None:
        """Moves the states of `entries`, which were loaded from a checkpoint, into the file."""
        names = {self._group_of.get(entry.partition("/")[2], "") for entry in entries}
        for record in (self._records[name] for name in names if name in self._records):
            found = self._state.offloaded.resting(record.action)
            loaded = [each for each in found if each.key not in record.masters]
            record.states.clear()
            record.add_states(loaded)
            for each in loaded:
                load_pages(record.resting[each.key], writes=True)
                record.resting[each.key].copy_(each.tensor)
                each.assign(record.resting[each.key], is_fetched=False)
        self._is_cached = True

    @property
    def host_nbytes(self) -> int:
        """The bytes of the buffers on the host."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _begin_step(self) -> None:
        for record in self._records.values():
            if record.buffer is not None:  # the last step failed
                self._leave_buffer(record, has_failed=True)
        self._drop_cache()

    def _drop_cache(self) -> None:
        if self._is_cached and self._file is not None:
            self._file.drop_cache()
            trim_heap()  # and what they were made in
        self._is_cached = False

    def _enter_buffer(self, action: Action, record: _Record) -> None:
        """Puts what the optimizer steps into the buffer that the record was read into."""
        if record.buffer is None:
            raise ValueError(f"{action.name} finds no states: READ_STATES has not read them")
        for each in self._state.offloaded.resting(record.action):
            record.in_buffer[each.key] = record.place(each.key).view(record.buffer)
            each.assign(record.in_buffer[each.key], is_fetched=True)
        weights = self._pinned(action.allocations[0]) if action.allocations else None
        store = self._state.flat_params
        flat_param = store.flat_param_of(action.tensors[0])
        if flat_param is None:
            store.master_weights.place_host_weights(action.tensors, weights)
        else:
            flat_param.place_host_weights(weights)

    def _leave_buffer(self, record: _Record, *, has_failed: bool) -> None:
        """Lets the tensors of a group rest in the file, and its buffers take those of another."""
        store = self._state.flat_params
        if has_failed and not record.states:  # the first step made some
            stepped = store.optimizer_params().items()
            for parameter in (each for name, each in stepped if name in record.action.tensors):
                for optimizer in self._state.optimizers:
                    optimizer.state.pop(parameter, None)
        for each in self._state.offloaded.resting(record.action):
            if each.key in record.resting:
                each.assign(record.resting[each.key], is_fetched=False)
        flat_param = store.flat_param_of(record.action.tensors[0])
        if flat_param is None:
            store.master_weights.release_host_copies(record.action.tensors)
        else:
            flat_param.release_host_copies()
        record.buffer = None
        record.in_buffer.clear()

    def _move(self, action: Action, record: _Record, *, writes: bool) -> None:
        """Starts to read the record of a group into its buffer, or to write it from there."""
        if record.buffer is not None:
            self._start_transfer(action, record.begin, record.buffer[: record.used_nbytes], writes=writes)

    def _start_transfer(
        self,
        action: Action,
        begin: int,
        buffer: torch.Tensor,
        after: Callable[[], None] | None = None,
        *,
        writes: bool = False,
    ) -> None:
        """Starts to read all of `buffer` from byte `begin` of the file on, or to write it there."""
        work: Work = CompletedWork()
        self._state.world.ledger.record_copy(action.name, buffer.nbytes)
        if self._file is not None and writes:
            work = self._file.start_write(begin, buffer, action.name)
        elif self._file is not None:
            work = self._file.start_read(begin, buffer, action.name, after)
        self._state.issue(action, work)

    def _end_of_copy(self, allocation: Allocation) -> Callable[[], None] | None:
        """Returns what waits until the weights in a buffer are on the device; None if they are."""
        return self._state.host_memory.end_of(self._copies.pop(allocation.name, None))

    def _page_aligned(self, allocation: Allocation) -> torch.Tensor:
        """Returns the buffer `allocation`, in memory that the file reads into."""
        if self._file is None:
            return self._pinned(allocation)
        if allocation.name not in self._buffers:
            self._buffers[allocation.name] = page_aligned(allocation.nbytes)
        return self._buffers[allocation.name]

    def _pinned(self, allocation: Allocation) -> torch.Tensor:
        """Returns the buffer `allocation`, in memory that copies fast to and from the device, and that the
        file can be read into: memory that is pinned begins at a page.
        """
        if allocation.name not in self._buffers:
            self._buffers[allocation.name] = self._state.host_memory.file_buffer(
                allocation.nbytes, self._like
            )
        return self._buffers[allocation.name]


def _records(reads: Iterable[Action], mapped: torch.Tensor) -> Iterator[_Record]:
    """Yields the records that `reads` read, one behind the other in the file, which is `mapped`."""
    begin = 0
    for read in reads:
        end = begin + _nbytes(read)
        yield _Record(read, begin, mapped[begin:end])
        begin = end


def _nbytes(action: Action) -> int:
    return 0 if action.transfer is None else action.transfer.nbytes
