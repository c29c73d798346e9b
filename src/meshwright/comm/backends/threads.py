"""A backend whose ranks are threads of one process: exact, deterministic, and quick to start.

The k-th collective that a rank issues on a group pairs with the k-th one of each other rank of the group. A
rank that issues one submits its tensors and continues; the last rank to arrive computes the result for all,
in rank order, so every run and every rank gets the same bits; `wait` returns when that is done.

    rank 0   submit ...... wait ......|->
    rank 1      submit, wait .........|->
    rank 2                submit+compute|->

On a GPU the kernels that compute the result wait for the streams on which ranks called, and the stream on
which a rank waits for them. Between its call and its wait a rank must not touch its tensors: they are read,
and filled, in place. Errors that would hang on a real network are reported: ranks that call different
collectives, a rank that waits for one that never arrives, a rank that fails (`ThreadBackend.abort` releases
all others at once).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Condition, RLock

import torch

from meshwright.comm.backends.fake import FakeGroup
from meshwright.comm.backends.thread_results import CollectiveInput, compute_results, wait_on_stream
from meshwright.comm.collectives.collective_call import (
    POINT_TO_POINT,
    CollectiveCall,
    announce,
    announce_exchange,
    announce_rows,
    member_ranks,
    ordered_axes,
)
from meshwright.comm.collectives.group import ExchangedMessage, Group, GroupKey, Rounds, Work, World
from meshwright.comm.collectives.ledger import Ledger
from meshwright.device.device_streams import record_event
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh

# whether it is point-to-point, and the ranks: collectives are numbered per channel
Channel = tuple[bool, tuple[int, ...]]


@dataclass(eq=False)
class PendingCollective:
    """The `number`-th collective of the group `ranks`: the inputs so far, and whether it is done."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    number: int
    inputs: dict[int, CollectiveInput] = field(default_factory=dict)
    is_done: bool = False
    callbacks: list[Callable[[], None]] = field(default_factory=list)  # when it is over
    result: torch.Event | None = None  # on a GPU, when the result is in place

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that have not submitted."""
        return tuple(rank for rank in self.ranks if rank not in self.inputs)


class ThreadBackend:
    """Matches and executes the collectives of all ranks of `mesh`.

    A wait lasts at most `timeout_s`; a failure ends all waits. A waiting rank is woken only by its own
    collective: of 24 ranks all but one may be waiting.
    """

    def __init__(self, mesh: Mesh, timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self._lock = RLock()
        self._conditions: dict[PendingCollective, Condition] = {}  # of those that somebody waits for
        self._pending: dict[tuple[Channel, int], PendingCollective] = {}
        self._arrived = Condition(self._lock)  # of a message that may be for a rank that receives from any
        self._num_issued: Counter[tuple[int, Channel]] = Counter()
        self._last_calls: dict[int, CollectiveCall] = {}
        self._left_ranks: set[int] = set()
        self._failure: tuple[int, BaseException] | None = None

    @property
    def failure(self) -> tuple[int, BaseException] | None:
        """The rank that failed first, and its error."""
        return self._failure

    def abort(self, rank: int, error: BaseException) -> None:
        """Releases every rank that waits, now or later, with the message that `rank` failed.

        Only the first abort counts.
        """
        with self._lock:
            self._failure = self._failure or (rank, error)
            self._wake_all()

    def leave(self, rank: int) -> None:
        """Marks that `rank` issues nothing more: ranks that wait for it fail at once."""
        with self._lock:
            self._left_ranks.add(rank)
            self._wake_all()

    def submit(self, rank: int, group: Group, collective_input: CollectiveInput) -> PendingCollective:
        """Returns the collective that this call of `rank` belongs to.

        It is done when `rank` was the last to arrive. A send and its receive pair in their order between
        these two ranks, whatever the others do. Raises CollectiveError when the call differs from a peer's,
        or when some rank has failed.
        """
        with self._lock:
            line = _channel(group, collective_input.call)
            number = self._num_issued[rank, line]
            self._num_issued[rank, line] += 1
            self._last_calls[rank] = collective_input.call
            self._raise_failure(rank, collective_input.call)
            pending = self._pending.setdefault((line, number), PendingCollective(line[1], group.axes, number))
            pending.inputs[rank] = collective_input
            first = next(iter(pending.inputs.values()))  # whom all that have come fit
            if not _is_compatible(first.call, collective_input.call):
                self._fail(rank, f"the ranks do not call the same collective.\n{self._table(pending)}")
            if pending.missing_ranks:
                if line[0]:
                    self._arrived.notify_all()
                return pending
            del self._pending[line, number]
        inputs = [pending.inputs[peer] for peer in pending.ranks]
        pending.result = compute_results(collective_input.call, inputs)
        with self._lock:
            pending.is_done = True
            pending.inputs.clear()
            for call in pending.callbacks:
                call()
            condition = self._conditions.pop(pending, None)
            if condition is not None:
                condition.notify_all()
        return pending

    def add_done_callback(self, pending: PendingCollective, callback: Callable[[], None]) -> None:
        """Calls `callback` when `pending` is done, in the thread that completes it; at once if it is."""
        with self._lock:
            if pending.is_done:
                wait_on_stream(pending.result)
                callback()
            else:
                pending.callbacks.append(callback)

    def wait(self, rank: int, call: CollectiveCall, pending: PendingCollective) -> None:
        """Returns when `pending` is done.

        Raises CollectiveError when it cannot be: a peer has left, some rank has failed, or `timeout_s` have
        passed.
        """

        def settled() -> bool:
            return (
                pending.is_done
                or self._failure is not None
                or not self._left_ranks.isdisjoint(pending.missing_ranks)
            )

        with self._lock:
            if pending.is_done:
                return
            condition = self._conditions.setdefault(pending, Condition(self._lock))
            in_time = condition.wait_for(settled, self.timeout_s)
            if pending.is_done:
                return
            self._raise_failure(rank, call)
            if in_time:
                self._fail(rank, f"rank {rank} waits for a rank that has ended.\n{self._table(pending)}")
            self._fail(
                rank,
                f"rank {rank} timed out: not all ranks joined within {self.timeout_s:g} s.\n"
                f"{self._table(pending)}",
            )

    def wait_for_sender(self, rank: int, ranks: Sequence[int]) -> int:
        """Returns which of `ranks` was the first to send what `rank` has not begun to receive.

        Raises CollectiveError when none does in `timeout_s`, all others have left, or a rank has failed.
        """
        others = [peer for peer in ranks if peer != rank]

        def first() -> int | None:
            # pending messages are in the order in which they were submitted
            return next(
                (line[1][0] for line, _ in self._pending if line in lines and self._is_new(rank, line)), None
            )

        lines = {(True, (peer, rank)) for peer in others}
        with self._lock:
            self._arrived.wait_for(
                lambda: (
                    first() is not None or self._failure is not None or self._left_ranks.issuperset(others)
                ),
                self.timeout_s,
            )
            if self._failure is not None:
                culprit, error = self._failure
                raise CollectiveError(f"rank {rank} was released: rank {culprit} failed first, with {error}")
            found = first()
            if found is None:
                text = f"rank {rank} waits for a message of one of the ranks {', '.join(map(str, others))}"
                self._fail(rank, f"{text}, and none has come within {self.timeout_s:g} s")
            return rank if found is None else found

    def _is_new(self, rank: int, line: Channel) -> bool:
        return (line, self._num_issued[rank, line]) in self._pending

    def _raise_failure(self, rank: int, call: CollectiveCall) -> None:
        if self._failure is not None:
            culprit, error = self._failure
            text = (
                f"rank {rank} was released from {call}: rank {culprit} failed first, with "
                f"{type(error).__name__}: {error}"
            )
            raise CollectiveError(text)

    def _fail(self, rank: int, text: str) -> None:
        repair = "Every rank must issue the same collectives, on the same tensors, in the same order"
        error = CollectiveError(f"{text}\n  repair: {repair}")
        self._failure = (rank, error)
        self._wake_all()
        raise error

    def _wake_all(self) -> None:
        self._arrived.notify_all()
        for condition in self._conditions.values():
            condition.notify_all()

    def _table(self, pending: PendingCollective) -> str:
        lines = [f"collective {pending.number} over {' x '.join(pending.axes)}:"]
        for rank in pending.ranks:
            if rank in pending.inputs:
                lines.append(f"  rank {rank}: {pending.inputs[rank].call}")
                continue
            state = "ended without joining" if rank in self._left_ranks else "never joined"
            last = (
                f"its last call was {self._last_calls[rank]}"
                if rank in self._last_calls
                else "it has called nothing yet"
            )
            lines.append(f"  rank {rank}: {state}; {last}")
        elsewhere = [
            rank
            for rank in range(self.mesh.world_size)
            if rank not in pending.ranks and rank in self._last_calls
        ]
        lines += [
            f"  rank {rank} (not in this group): its last call was {self._last_calls[rank]}"
            for rank in elsewhere
        ]
        return "\n".join(lines)


def _channel(group: Group, call: CollectiveCall) -> Channel:
    if call.collective not in POINT_TO_POINT or call.source is None:
        return False, group.ranks
    own, peer = group.ranks[group.index], group.ranks[call.source]
    return True, (own, peer) if call.collective == "send" else (peer, own)


def _is_compatible(one: CollectiveCall, other: CollectiveCall) -> bool:
    """Whether two calls pair: equal, or for a send and its receive the same dtype and number of elements."""
    if one.collective not in POINT_TO_POINT:
        return one == other
    return (one.dtype, prod(one.shape)) == (other.dtype, prod(other.shape))


class ThreadWork(Work):
    """A collective that this rank has submitted to."""

    def __init__(
        self, backend: ThreadBackend, rank: int, call: CollectiveCall, pending: PendingCollective
    ) -> None:
        self._backend = backend
        self._rank = rank
        self._call = call
        self._pending = pending

    def wait(self) -> None:
        """Returns when the result is in place, or will be before what follows on this stream. Raises
        CollectiveError when it never will be.
        """
        self._backend.wait(self._rank, self._call, self._pending)
        wait_on_stream(self._pending.result)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the thread of the last rank to arrive."""
        self._backend.add_done_callback(self._pending, callback)


class ThreadGroup(Group):
    """The ranks along `axes`, each of them a thread."""

    transport = "threads"

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], world: "ThreadWorld") -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = ranks.index(world.rank)
        self.ledger = world.ledger
        self._backend = world.backend
        self._rank, self._on_device = world.rank, None if world.device.type == "cpu" else world.device

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Sends `tensor` to the rank at index `target`; the wait returns when it has received it."""
        return self._submit(announce(self, "send", tensor, action=action, source=target), tensor, None)

    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fills `tensor` with what the rank at index `source` sends."""
        return self._submit(announce(self, "recv", tensor, action=action, source=source), tensor, tensor)

    def recv_any(self, tensor: torch.Tensor, *, action: str = "") -> int:
        """Fills `tensor` with what was sent first; returns the index of the rank that sent it."""
        source = self.ranks.index(self._backend.wait_for_sender(self._rank, self.ranks))
        self.recv(tensor, source=source, action=action).wait()
        return source

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sums `tensor` over the group, in place: in rank order, or as the rounds of `algorithm` say.

        Raises PlanError for an algorithm that is unknown, or cannot run in this group.
        """
        return self._submit(
            announce(self, "all_reduce", tensor, action=action, algorithm=algorithm), tensor, tensor
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        return self._submit(announce(self, "all_gather", tensor, output, action=action), tensor, output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        return self._submit(announce(self, "reduce_scatter", tensor, output, action=action), tensor, output)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Sends slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        return self._submit(announce(self, "all_to_all", tensor, output, action=action), tensor, output)

    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Sends `input_splits[i]` rows of `tensor` to rank i; `output_splits[i]` rows come from rank i."""
        call = announce_rows(self, output, tensor, output_splits, input_splits, action)
        return self._submit(call, tensor, output, tuple(input_splits))

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Sends `tensor` to the rank `by` places on, round the group.

        `output` comes from the rank as far behind.
        """
        return self._submit(
            announce(self, "shift", tensor, output, action=action, source=offset % self.size), tensor, output
        )

    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Runs the rounds of all ranks in turn, in the thread of the last one to arrive."""
        call, rounds = announce_exchange(self, rounds, messages, action)
        return self._submit(call, torch.empty(0), None, rounds=rounds)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrites `tensor` with that of the rank at index `source` of the group."""
        return self._submit(announce(self, "broadcast", tensor, action=action, source=source), tensor, tensor)

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fills `output` with this rank's slice of the source's `tensor` (size x output.numel() elements;
        None elsewhere).
        """
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        return self._submit(call, output if tensor is None else tensor, output)

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fills the target's `output` (size x tensor.numel() elements;
        None elsewhere) with all ranks' `tensor`, in rank order.
        """
        return self._submit(
            announce(self, "gather", tensor, output, action=action, source=target), tensor, output
        )

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sums `tensor` over the group in rank order, in place on the rank at index `target`."""
        call = announce(self, "reduce", tensor, action=action, source=target)
        return self._submit(call, tensor, tensor if self.index == target else None)

    def barrier(self, *, action: str = "") -> None:
        """Returns when every rank has come."""
        token = torch.empty(0)
        self._submit(announce(self, "barrier", token, action=action), token, token).wait()

    def _submit(
        self,
        call: CollectiveCall,
        tensor: torch.Tensor,
        output: torch.Tensor | None,
        splits: tuple[int, ...] = (),
        rounds: Rounds | None = None,
    ) -> Work:
        ready = None if self._on_device is None else record_event(self._on_device)
        given = CollectiveInput(call, tensor, output, splits, rounds, ready)
        return ThreadWork(self._backend, self._rank, call, self._backend.submit(self._rank, self, given))


class ThreadWorld(World):
    """Rank `rank` of the job that `backend` runs. It belongs to one thread at a time."""

    def __init__(self, backend: ThreadBackend, rank: int, device: torch.device | str = "cpu") -> None:
        self.backend = backend
        self.mesh = backend.mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[GroupKey, Group] = {}

    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """Returns the group along `axes`. Raises PlanError for an unknown axis."""
        along = ordered_axes(self.mesh, tuple(axes))
        key = along, tuple(member_indices)
        if key not in self._groups:
            ranks = member_ranks(self.mesh.peers(self.rank, along), member_indices, self.rank)
            solo = len(ranks) == 1
            self._groups[key] = (
                FakeGroup(along, ranks, 0, self.ledger) if solo else ThreadGroup(along, ranks, self)
            )
            self._groups[key].member_indices = key[1]
        return self._groups[key]

    def close(self) -> None:
        """Tells the backend that this rank issues nothing more."""
        self.backend.leave(self.rank)


def single_rank_world(device: torch.device) -> World:
    """Returns the world of one rank that has no peers, on `device`."""
    return ThreadWorld(ThreadBackend(Mesh()), 0, device)
