"""The collectives of ranks that share memory; sends, receives and named algorithms go over gloo.

    issue                                              wait
    short    posted at once                            computes the result from what all have posted
    long     submitted to the communication thread     done by the thread, or by the waiting caller

A place in the memory is reused after a while. If its last user has not finished, on any rank, an operation is
*deferred*: the communication thread posts it later, and all that follow it go the same way, so that the order
stays. Thus issuing never blocks, and a rank can still do what its peers wait for.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import final

import torch
from torch.autograd.graph import increment_version

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.backends.comm_thread import CommThread
from meshwright.comm.backends.fake import CompletedWork, copy_to_output
from meshwright.comm.backends.process_group import TorchGroup
from meshwright.comm.collectives.collective_call import CollectiveCall, announce
from meshwright.comm.collectives.comm_volume import ONE_RECEIVER
from meshwright.comm.collectives.deterministic_sum import SUMMABLE_DTYPES
from meshwright.comm.collectives.group import ExchangedMessage, Group, Rounds, Work
from meshwright.comm.shared_memory.segment import DONE, MISMATCH, PENDING, SharedSegment
from meshwright.comm.watchdog.watchdog import WatchedWait, wait_until
from meshwright.plan.job.errors import CollectiveError

MAX_SLOT_NBYTES = 1 << 16  # bytes of an operand that fits a slot, as in chunks.h
NUM_PLACES = 16  # as in chunks.h
FIRST_WAIT_NS = 100_000_000  # so long a wait looks at nothing else

COLLECTIVE_CODES = MappingProxyType(  # as in chunks.h
    {
        name: number
        for number, name in enumerate(
            (
                "all_reduce",
                "reduce",
                "all_gather",
                "gather",
                "broadcast",
                "reduce_scatter",
                "all_to_all",
                "scatter",
                "barrier",
                "shift",
            )
        )
    }
)
DTYPE_CODES = MappingProxyType({dtype: number for number, dtype in enumerate(SUMMABLE_DTYPES)})


class SharedMemoryWork(Work):
    """An operation, from its issue to its end.

    It is finished once, by a waiting caller or by the communication thread.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_group",
        "_lock",
        "call",
        "is_posted",
        "number",
        "operand",
        "result",
        "sequence_id",
    )

    def __init__(
        self,
        group: "SharedMemoryGroup",
        number: int,
        call: CollectiveCall,
        operand: torch.Tensor,
        result: torch.Tensor,
    ) -> None:
        self._group, self.number, self.call = group, number, call
        self.sequence_id = group.ledger.flight_recorder.sequence_id  # among all that this rank has announced
        self.operand, self.result = operand, result  # they live until the end
        self.is_posted = self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = Lock()

    def wait(self) -> None:
        """Returns when the result is in place. Raises CollectiveError when it will not be."""
        with self._lock:
            if self._done:
                return
            self._group.complete(self)
            self._done = True
        for call in self._callbacks:
            call()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the thread that waits."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()


@final
class SharedMemoryGroup(Group):
    """The ranks of `gloo_group`, all on this host, that share `segment`.

    Waits have the limits of `gloo_group`.
    """

    transport = "shared memory"

    def __init__(self, gloo_group: TorchGroup, segment: SharedSegment) -> None:
        self.axes, self.ranks, self.index, self.ledger = (
            gloo_group.axes,
            gloo_group.ranks,
            gloo_group.index,
            gloo_group.ledger,
        )
        self.device = gloo_group.device
        self._gloo_group = gloo_group
        self._segment = segment
        self._num_issued = self._num_deferred = 0
        self._pending: dict[int, SharedMemoryWork] = {}
        self._issue_lock = Lock()  # to number, and to post in that order
        self._comm_thread: CommThread | None = None
        self._failure: CollectiveError | None = None

    def close(self) -> None:
        """Tells the others that this rank issues nothing more; operations in flight here fail."""
        repair = "Wait for a collective before the world closes"
        self._failure = self._failure or CollectiveError(
            f"the group was closed before this collective had completed. {repair}"
        )
        self._segment.leave()
        if self._comm_thread is not None:
            self._comm_thread.close()
        self._gloo_group.close()

    def abort(self) -> None:
        """Makes operations in flight fail, here and on the peers."""
        self._segment.leave()
        self._gloo_group.abort()

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Sends `tensor` to the rank at index `target`, over gloo."""
        return self._gloo_group.send(tensor, target=target, action=action)

    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fills `tensor` with what the rank at index `source` sends, over gloo."""
        return self._gloo_group.recv(tensor, source=source, action=action)

    def recv_any(self, tensor: torch.Tensor, *, action: str = "") -> int:
        """Fills `tensor` with what comes first, over gloo; returns the index of the rank that sent it."""
        return self._gloo_group.recv_any(tensor, action=action)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = BACKEND) -> Work:
        """Sums `tensor` over the group in rank order, in place.

        By another algorithm than the backend's over gloo. Raises PlanError for an algorithm that is unknown,
        or cannot run in this group.
        """
        if algorithm != BACKEND:
            return self._gloo_group.all_reduce(tensor, action=action, algorithm=algorithm)
        return self._issue(announce(self, "all_reduce", tensor, action=action), tensor, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        return self._issue(announce(self, "all_gather", tensor, output, action=action), tensor, output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        return self._issue(announce(self, "reduce_scatter", tensor, output, action=action), tensor, output)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Sends slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        return self._issue(announce(self, "all_to_all", tensor, output, action=action), tensor, output)

    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Sends `input_splits[i]` rows to rank i; `output_splits[i]` come from rank i; over gloo."""
        return self._gloo_group.all_to_all_v(
            output, tensor, output_splits=output_splits, input_splits=input_splits, action=action
        )

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Sends `tensor` to the rank `by` places on, round the group.

        `output` comes from the rank as far behind.
        """
        call = announce(self, "shift", tensor, output, action=action, source=offset % self.size)
        return self._issue(call, tensor, output) if call.source else copy_to_output(output, tensor)

    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Runs `rounds` over gloo."""
        return self._gloo_group.exchange(rounds, messages, action=action)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrites `tensor` with that of the rank at index `source` of the group."""
        return self._issue(announce(self, "broadcast", tensor, action=action, source=source), tensor, tensor)

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fills `output` with this rank's slice of the source's `tensor` (size x output.numel() elements;
        None elsewhere).
        """
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        return self._issue(call, output if tensor is None else tensor, output)

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fills the target's `output` (size x tensor.numel() elements;
        None elsewhere) with all ranks' `tensor`, in rank order.
        """
        call = announce(self, "gather", tensor, output, action=action, source=target)
        return self._issue(call, tensor, tensor if output is None else output)

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sums `tensor` over the group in rank order, in place on the rank at index `target`.

        The others keep theirs.
        """
        return self._issue(announce(self, "reduce", tensor, action=action, source=target), tensor, tensor)

    def barrier(self, *, action: str = "") -> None:
        """Returns when every rank has come."""
        token = torch.empty(0)
        self._issue(announce(self, "barrier", token, action=action), token, token).wait()

    def complete(self, work: SharedMemoryWork) -> None:
        """Returns when the result of `work`, which is posted, is in place.

        Raises CollectiveError when it cannot be.
        """
        self._wait(partial(self._segment.finish, work.number), work, for_place=False)
        self._pending.pop(work.number, None)
        filled = work.call.collective not in ONE_RECEIVER or work.call.source == self.index
        if filled and not work.result.is_inference():
            increment_version(
                work.result
            )  # else autograd would not notice that a tensor it has saved was overwritten

    def _issue(self, call: CollectiveCall, operand: torch.Tensor, result: torch.Tensor) -> Work:
        if operand.numel() == 0 and call.collective != "barrier":
            return CompletedWork()  # nothing to move, on any rank
        if self._failure is not None:
            raise CollectiveError(
                f"{self._call_text(call)} is refused: an earlier one has failed"
            ) from self._failure
        with self._issue_lock:
            work = SharedMemoryWork(self, self._num_issued, call, operand, result)
            self._num_issued += 1
            self._pending[work.number] = work
            if not self._num_deferred:
                work.is_posted = self._post(work)
            self._num_deferred += not work.is_posted
        if work.is_posted and self._nbytes(work) <= MAX_SLOT_NBYTES:
            return work
        self._comm_thread = self._comm_thread or CommThread(f"memory shared over {' x '.join(self.axes)}")
        return self._comm_thread.submit(work.wait if work.is_posted else partial(self._post_deferred, work))

    def _post(self, work: SharedMemoryWork) -> bool:
        call = work.call
        return self._segment.post(
            work.number,
            COLLECTIVE_CODES[call.collective],
            DTYPE_CODES.get(call.dtype, len(SUMMABLE_DTYPES) + call.dtype.itemsize),
            call.source or 0,
            work.operand.data_ptr(),
            work.result.data_ptr(),
            self._nbytes(work),
        )

    def _nbytes(self, work: SharedMemoryWork) -> int:
        """Bytes of the operand; for a scatter, where only one rank has it, of all its pieces."""
        return work.result.nbytes * self.size if work.call.collective == "scatter" else work.operand.nbytes

    def _post_deferred(self, work: SharedMemoryWork) -> None:
        last = self._pending.get(work.number - NUM_PLACES)
        if last is not None:
            last.wait()  # its place is needed, and nobody else may ever come to wait for it
        self._wait(partial(self._segment.wait_for_place, work.number), work, for_place=True)
        work.is_posted = self._post(work)
        with self._issue_lock:
            self._num_deferred -= 1
        work.wait()

    def _wait(self, attempt: Callable[[int], int], work: SharedMemoryWork, *, for_place: bool) -> None:
        """Calls `attempt`, which waits for the given nanoseconds, until it is done."""
        answer = attempt(FIRST_WAIT_NS)
        if answer == DONE:
            return
        with self._gloo_group.watchdog.watch_wait(work.sequence_id) as waiting:
            try:
                if answer == MISMATCH:
                    self._raise_disagreement(work, waiting)
                self._raise_if_blocked(work, waiting, for_place)
                wait_until(waiting, partial(self._is_done, attempt, work, waiting, for_place))
            except CollectiveError as error:
                self._failure = self._failure or error
                raise

    def _is_done(
        self,
        attempt: Callable[[int], int],
        work: SharedMemoryWork,
        waiting: WatchedWait,
        for_place: bool,
        wait_s: float,
    ) -> bool:
        answer = attempt(int(wait_s * 1e9))
        if answer == MISMATCH:
            self._raise_disagreement(work, waiting)
        if answer == PENDING:
            self._raise_if_blocked(work, waiting, for_place)
        return answer == DONE

    def _raise_if_blocked(self, work: SharedMemoryWork, waiting: WatchedWait, for_place: bool) -> None:
        """Raises CollectiveError when `work` waits for a rank that will not arrive.

        Or differs from what a peer has issued.
        """
        if self._failure is not None:
            raise self._failure
        if not for_place and not self._segment.is_consistent(work.number):
            self._raise_disagreement(work, waiting)
        lost = self._segment.lost_indices()  # first: what a rank did before it left counts
        for index in self._segment.awaited_indices(work.number, for_place=for_place):
            if index in lost:
                why = f"connection closed by peer: rank {self.ranks[index]} {lost[index]}"
                # by this cause others see that it is not this rank's own error
                raise waiting.error_for(
                    f"{self._call_text(work.call)} did not complete: {why}"
                ) from RuntimeError(why)

    def _raise_disagreement(self, work: SharedMemoryWork, waiting: WatchedWait) -> None:
        names = {number: name for name, number in COLLECTIVE_CODES.items()}
        lines = [f"{self._call_text(work.call)} did not complete: the ranks do not call the same collective."]
        for index, rank in enumerate(self.ranks):
            said = self._segment.posted_call(work.number, index)
            if said is None:
                lines.append(f"  rank {rank}: has not issued it")
                continue
            kind, dtype, source, nbytes = said
            elements = (
                str(SUMMABLE_DTYPES[dtype]).removeprefix("torch.")
                if dtype < len(SUMMABLE_DTYPES)
                else "other elements"
            )
            one = (
                f", to or from index {source}"
                if names[kind] in ("broadcast", "scatter", "gather", "reduce")
                else ""
            )
            one = f", by {source}" if names[kind] == "shift" else one
            lines.append(f"  rank {rank}: {names[kind]} of {nbytes} bytes of {elements}{one}")
        lines.append(
            "  repair: Every rank must issue the same collectives, on the same tensors, in the same order"
        )
        raise waiting.error_for("\n".join(lines))

    def _call_text(self, call: CollectiveCall) -> str:
        return (
            f"rank {self.ranks[self.index]}: {call} over {' x '.join(self.axes)} (ranks "
            f"{', '.join(map(str, self.ranks))})"
        )
