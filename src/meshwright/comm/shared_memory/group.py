"""The collectives of ranks that share memory; what is not worth it, or not possible there, goes over gloo.

    issue                                       wait
    short    posted at once                     the result is made from what all have posted
    long     put into the group's lane          the lane has played it, or plays it now

A place in the memory is used again after a while. Where its last user has not finished, on any rank, an operation is *held*:
the lane posts it later, and all that follow it go the same way, so that the order stays. Thus a rank that issues never waits,
and may still do what its peers wait for.
"""

from collections.abc import Callable
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import final

import torch
from torch.autograd.graph import increment_version

from meshwright.comm.algorithms import BACKEND
from meshwright.comm.backends.comm_thread import Lane
from meshwright.comm.backends.fake import Done, kept
from meshwright.comm.backends.process_group import TorchGroup
from meshwright.comm.collectives.announce import TO_ONE, Call, announce
from meshwright.comm.collectives.deterministic_sum import SUMMABLE
from meshwright.comm.collectives.group import Group, Work
from meshwright.comm.shared_memory.segment import DISAGREE, DONE, NOT_YET, Segment
from meshwright.comm.watchdog.watchdog import Waiting, waited
from meshwright.plan.job.errors import CollectiveError

SHORT = 1 << 16  # bytes of an operand that fits a slot, as in chunks.h
PLACES = 16  # as in chunks.h
FIRST_NS = 100_000_000  # so long a wait looks at nothing else

KINDS = MappingProxyType(  # as in chunks.h
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
TYPES = MappingProxyType({dtype: number for number, dtype in enumerate(SUMMABLE)})


class SharedWork(Work):
    """An operation, from its issue to its end. It is finished once, by whoever comes first: a caller, or the lane."""

    __slots__ = (
        "_calls",
        "_group",
        "_lock",
        "_over",
        "call",
        "number",
        "operand",
        "order",
        "posted",
        "result",
    )

    def __init__(
        self, group: "SharedGroup", number: int, call: Call, operand: torch.Tensor, result: torch.Tensor
    ) -> None:
        self._group, self.number, self.call = group, number, call
        self.order = group.ledger.recent.order  # among all that this rank has announced
        self.operand, self.result = operand, result  # they live until the end
        self.posted = self._over = False
        self._calls: list[Callable[[], None]] = []
        self._lock = Lock()

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when it will not be."""
        with self._lock:
            if self._over:
                return
            self._group.complete(self)
            self._over = True
        for call in self._calls:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called by whoever waits."""
        with self._lock:
            if not self._over:
                self._calls.append(call)
                return
        call()


@final
class SharedGroup(Group):
    """The ranks of `outer`, all on this host, that share `segment`. Waits last as long as those of `outer` may."""

    transport = "shared memory"

    def __init__(self, outer: TorchGroup, segment: Segment) -> None:
        self.axes, self.ranks, self.index, self.ledger = outer.axes, outer.ranks, outer.index, outer.ledger
        self.device = outer.device
        self._outer = outer
        self._segment = segment
        self._issued = self._held = 0
        self._under_way: dict[int, SharedWork] = {}
        self._turn = Lock()  # to number, and to post in that order
        self._lane: Lane | None = None
        self._failure: CollectiveError | None = None

    def close(self) -> None:
        """Tell the others that this rank comes to nothing more; what is under way here ends with an error."""
        repair = "Wait for a collective before the world closes"
        self._failure = self._failure or CollectiveError(
            f"the group was closed before this was over. {repair}"
        )
        self._segment.leave()
        if self._lane is not None:
            self._lane.close()
        self._outer.close()

    def cut(self) -> None:
        """Have what is under way end with an error, here and on the peers."""
        self._segment.leave()
        self._outer.cut()

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Send `tensor` to the rank at index `target`, over gloo."""
        return self._outer.send(tensor, target=target, action=action)

    def receive(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fill `tensor` with what the rank at index `source` sends, over gloo."""
        return self._outer.receive(tensor, source=source, action=action)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = BACKEND) -> Work:
        """Sum `tensor` over the group in rank order, in place; by another algorithm than the backend's over gloo.

        Raises PlanError for an algorithm that is unknown, or cannot run in this group.
        """
        if algorithm != BACKEND:
            return self._outer.all_reduce(tensor, action=action, algorithm=algorithm)
        return self._issue(announce(self, "all_reduce", tensor, action=action), tensor, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        return self._issue(announce(self, "all_gather", tensor, output, action=action), tensor, output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        return self._issue(announce(self, "reduce_scatter", tensor, output, action=action), tensor, output)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        return self._issue(announce(self, "all_to_all", tensor, output, action=action), tensor, output)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, by: int = 1, action: str = "") -> Work:
        """Send `tensor` to the rank `by` places on, round the group; `output` comes from the rank as far behind."""
        call = announce(self, "shift", tensor, output, action=action, source=by % self.size)
        return self._issue(call, tensor, output) if call.source else kept(output, tensor)

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source` of the group."""
        return self._issue(announce(self, "broadcast", tensor, action=action, source=source), tensor, tensor)

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        return self._issue(call, output if tensor is None else tensor, output)

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""
        call = announce(self, "gather", tensor, output, action=action, source=target)
        return self._issue(call, tensor, tensor if output is None else output)

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group in rank order, in place on the rank at index `target`; the others keep theirs."""
        return self._issue(announce(self, "reduce", tensor, action=action, source=target), tensor, tensor)

    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""
        token = torch.empty(0)
        self._issue(announce(self, "barrier", token, action=action), token, token).wait()

    def complete(self, work: SharedWork) -> None:
        """Return when the result of `work`, which is posted, is in place. Raises CollectiveError when it cannot be."""
        self._wait(partial(self._segment.finish, work.number), work, for_room=False)
        self._under_way.pop(work.number, None)
        filled = work.call.collective not in TO_ONE or work.call.source == self.index
        if filled and not work.result.is_inference():
            increment_version(
                work.result
            )  # else autograd would not notice that a tensor it has saved was overwritten

    def _issue(self, call: Call, operand: torch.Tensor, result: torch.Tensor) -> Work:
        if operand.numel() == 0 and call.collective != "barrier":
            return Done()  # nothing to move, on any rank
        if self._failure is not None:
            raise CollectiveError(
                f"{self._where(call)} is refused: an earlier one has failed"
            ) from self._failure
        with self._turn:
            work = SharedWork(self, self._issued, call, operand, result)
            self._issued += 1
            self._under_way[work.number] = work
            if not self._held:
                work.posted = self._post(work)
            self._held += not work.posted
        if work.posted and self._nbytes(work) <= SHORT:
            return work
        self._lane = self._lane or Lane(f"memory shared over {' x '.join(self.axes)}")
        return self._lane.put(work.wait if work.posted else partial(self._post_held, work))

    def _post(self, work: SharedWork) -> bool:
        call = work.call
        return self._segment.post(
            work.number,
            KINDS[call.collective],
            TYPES.get(call.dtype, len(SUMMABLE) + call.dtype.itemsize),
            call.source or 0,
            work.operand.data_ptr(),
            work.result.data_ptr(),
            self._nbytes(work),
        )

    def _nbytes(self, work: SharedWork) -> int:
        """Of the operand; in a scatter, where only one has it, of all its pieces."""
        return work.result.nbytes * self.size if work.call.collective == "scatter" else work.operand.nbytes

    def _post_held(self, work: SharedWork) -> None:
        last = self._under_way.get(work.number - PLACES)
        if last is not None:
            last.wait()  # its place is needed, and nobody else may ever come to wait for it
        self._wait(partial(self._segment.room, work.number), work, for_room=True)
        work.posted = self._post(work)
        with self._turn:
            self._held -= 1
        work.wait()

    def _wait(self, attempt: Callable[[int], int], work: SharedWork, *, for_room: bool) -> None:
        """Call `attempt`, which waits for so many nanoseconds, until it is done. Every wait of this group is one of these."""
        answer = attempt(FIRST_NS)
        if answer == DONE:
            return
        with self._outer.lookout.waiting(work.order) as waiting:
            try:
                if answer == DISAGREE:
                    self._raise_disagreement(work, waiting)
                self._look_round(work, waiting, for_room)
                waited(waiting, partial(self._over, attempt, work, waiting, for_room))
            except CollectiveError as error:
                self._failure = self._failure or error
                raise

    def _over(
        self, attempt: Callable[[int], int], work: SharedWork, waiting: Waiting, for_room: bool, wait_s: float
    ) -> bool:
        answer = attempt(int(wait_s * 1e9))
        if answer == DISAGREE:
            self._raise_disagreement(work, waiting)
        if answer == NOT_YET:
            self._look_round(work, waiting, for_room)
        return answer == DONE

    def _look_round(self, work: SharedWork, waiting: Waiting, for_room: bool) -> None:
        """Raise CollectiveError when `work` waits for a rank that will not come, or differs from what a peer has issued."""
        if self._failure is not None:
            raise self._failure
        if not for_room and not self._segment.agree(work.number):
            self._raise_disagreement(work, waiting)
        lost = self._segment.lost()  # first: what a rank did before it left counts
        for index in self._segment.awaited(work.number, for_room=for_room):
            if index in lost:
                why = f"connection closed by peer: rank {self.ranks[index]} {lost[index]}"
                # by this cause others see that it is not this rank's own error
                raise waiting.failed(f"{self._where(work.call)} did not complete: {why}") from RuntimeError(
                    why
                )

    def _raise_disagreement(self, work: SharedWork, waiting: Waiting) -> None:
        names = {number: name for name, number in KINDS.items()}
        lines = [f"{self._where(work.call)} did not complete: the ranks do not call the same collective."]
        for index, rank in enumerate(self.ranks):
            said = self._segment.said(work.number, index)
            if said is None:
                lines.append(f"  rank {rank}: has not come")
                continue
            kind, dtype, source, nbytes = said
            elements = (
                str(SUMMABLE[dtype]).removeprefix("torch.") if dtype < len(SUMMABLE) else "other elements"
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
        raise waiting.failed("\n".join(lines))

    def _where(self, call: Call) -> str:
        return f"rank {self.ranks[self.index]}: {call} over {' x '.join(self.axes)} (ranks {', '.join(map(str, self.ranks))})"
