"""Where ranks that are threads meet: the k-th collective of each of them is one meeting, and the last to come computes it."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod
from threading import Condition, RLock

import torch

from meshwright.comm.algorithms import BACKEND, named
from meshwright.comm.collective import PAIRWISE, Call, slices
from meshwright.comm.group import Group
from meshwright.comm.rounds import play_all
from meshwright.comm.sums import ordered_sum
from meshwright.core.errors import CollectiveError
from meshwright.core.mesh import Mesh

Line = tuple[bool, tuple[int, ...]]  # whether one rank sends to another, and the ranks: what they issue there is numbered


@dataclass(frozen=True)
class Post:
    """What one rank brings to a meeting."""

    call: Call
    tensor: torch.Tensor
    output: torch.Tensor | None


@dataclass(eq=False)
class Meeting:
    """One collective of the group `ranks`, the `number`-th of that group: who has come, and whether it is over."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    number: int
    posts: dict[int, Post] = field(default_factory=dict)
    over: bool = False
    calls: list[Callable[[], None]] = field(default_factory=list)  # when it is over

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come."""
        return tuple(rank for rank in self.ranks if rank not in self.posts)


class ThreadHub:
    """Where the ranks of `mesh` meet. A wait lasts at most `timeout_s`; after a failure nobody waits.

    Whoever waits for a meeting is woken when that one is over, and not by others: of 24 ranks all but one may be waiting.
    """

    def __init__(self, mesh: Mesh, timeout_s: float = 60.0) -> None:
        self.mesh = mesh
        self.timeout_s = timeout_s
        self._lock = RLock()
        self._bells: dict[Meeting, Condition] = {}  # of those that somebody waits for
        self._meetings: dict[tuple[Line, int], Meeting] = {}
        self._issued: Counter[tuple[int, Line]] = Counter()
        self._last: dict[int, Call] = {}
        self._left: set[int] = set()
        self._failure: tuple[int, BaseException] | None = None

    @property
    def failure(self) -> tuple[int, BaseException] | None:
        """The rank that failed first, and its error."""
        return self._failure

    def abort(self, rank: int, error: BaseException) -> None:
        """Release every rank that waits, or will wait, with the news that `rank` failed. Only the first abort counts."""
        with self._lock:
            self._failure = self._failure or (rank, error)
            self._wake_all()

    def leave(self, rank: int) -> None:
        """Note that `rank` issues nothing more: whoever waits for it learns so at once."""
        with self._lock:
            self._left.add(rank)
            self._wake_all()

    def post(self, rank: int, group: Group, post: Post) -> Meeting:
        """The meeting that this call of `rank` belongs to; over, when `rank` was the last to come.

        A send and its receive meet in their order between these two ranks, whatever the others do.
        Raises CollectiveError when the call differs from what a peer called, or when some rank has failed.
        """
        with self._lock:
            line = _line(group, post.call)
            number = self._issued[rank, line]
            self._issued[rank, line] += 1
            self._last[rank] = post.call
            self._raise_failure(rank, post.call)
            meeting = self._meetings.setdefault((line, number), Meeting(line[1], group.axes, number))
            meeting.posts[rank] = post
            first = next(iter(meeting.posts.values()))  # whom all that have come fit
            if not _fits(first.call, post.call):
                self._fail(rank, f"the ranks do not call the same collective.\n{self._table(meeting)}")
            if meeting.missing:
                return meeting
            del self._meetings[line, number]
        _complete(post.call, [meeting.posts[peer] for peer in meeting.ranks])
        with self._lock:
            meeting.over = True
            meeting.posts.clear()
            for call in meeting.calls:
                call()
            bell = self._bells.pop(meeting, None)
            if bell is not None:
                bell.notify_all()
        return meeting

    def when_over(self, meeting: Meeting, call: Callable[[], None]) -> None:
        """Have `call` called when `meeting` is over, by the rank that ends it; now if it is."""
        with self._lock:
            if meeting.over:
                call()
            else:
                meeting.calls.append(call)

    def wait(self, rank: int, call: Call, meeting: Meeting) -> None:
        """Return when `meeting` is over.

        Raises CollectiveError when it cannot end: a peer has left, some rank has failed, or `timeout_s` have passed.
        """

        def settled() -> bool:
            return meeting.over or self._failure is not None or not self._left.isdisjoint(meeting.missing)

        with self._lock:
            if meeting.over:
                return
            bell = self._bells.setdefault(meeting, Condition(self._lock))
            in_time = bell.wait_for(settled, self.timeout_s)
            if meeting.over:
                return
            self._raise_failure(rank, call)
            if in_time:
                self._fail(rank, f"rank {rank} waits for a rank that has ended.\n{self._table(meeting)}")
            self._fail(rank, f"rank {rank} is stuck: nobody came within {self.timeout_s:g} s.\n{self._table(meeting)}")

    def _raise_failure(self, rank: int, call: Call) -> None:
        if self._failure is not None:
            culprit, error = self._failure
            text = f"rank {rank} was released from {call}: rank {culprit} failed first, with {type(error).__name__}: {error}"
            raise CollectiveError(text)

    def _fail(self, rank: int, text: str) -> None:
        repair = "Every rank must issue the same collectives, on the same tensors, in the same order"
        error = CollectiveError(f"{text}\n  repair: {repair}")
        self._failure = (rank, error)
        self._wake_all()
        raise error

    def _wake_all(self) -> None:
        for bell in self._bells.values():
            bell.notify_all()

    def _table(self, meeting: Meeting) -> str:
        lines = [f"collective {meeting.number} over {' x '.join(meeting.axes)}:"]
        for rank in meeting.ranks:
            if rank in meeting.posts:
                lines.append(f"  rank {rank}: {meeting.posts[rank].call}")
                continue
            state = "ended without coming" if rank in self._left else "never came"
            last = f"its last call was {self._last[rank]}" if rank in self._last else "it has called nothing yet"
            lines.append(f"  rank {rank}: {state}; {last}")
        elsewhere = [rank for rank in range(self.mesh.world) if rank not in meeting.ranks and rank in self._last]
        lines += [f"  rank {rank} (not in this group): its last call was {self._last[rank]}" for rank in elsewhere]
        return "\n".join(lines)


def _line(group: Group, call: Call) -> Line:
    if call.collective not in PAIRWISE or call.source is None:
        return False, group.ranks
    own, peer = group.ranks[group.index], group.ranks[call.source]
    return True, (own, peer) if call.collective == "send" else (peer, own)


def _fits(one: Call, other: Call) -> bool:
    """Whether two ranks that meet want the same: of a send and its receive, as many elements of one dtype."""
    if one.collective not in PAIRWISE:
        return one == other
    return (one.dtype, prod(one.shape)) == (other.dtype, prod(other.shape))


@torch.no_grad()
def _complete(call: Call, posts: list[Post]) -> None:
    operands = [post.tensor for post in posts]
    for post, result in zip(posts, _results(call, operands), strict=True):
        if post.output is not None:  # else this rank gets none
            post.output.view(-1).copy_(result.view(-1))


def _results(call: Call, operands: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """What each rank gets, in rank order."""
    size, one = len(operands), call.source or 0
    match call.collective:
        case "all_reduce" if call.algorithm != BACKEND:
            totals = [operand.detach().view(-1).clone() for operand in operands]
            play_all(named(call.algorithm), totals)
            return totals
        case "send" | "receive":
            return [operands[0]] * size
        case "all_reduce" | "reduce":
            return [ordered_sum(operands)] * size
        case "all_gather" | "gather":
            return [torch.cat([operand.view(-1) for operand in operands])] * size
        case "reduce_scatter":
            return (ordered_sum(pieces) for pieces in zip(*(slices(operand, size) for operand in operands), strict=True))
        case "all_to_all":
            return (torch.cat(pieces) for pieces in zip(*(slices(operand, size) for operand in operands), strict=True))
        case "shift":
            return [operands[(index - one) % size] for index in range(size)]
        case "broadcast":
            return [operands[one]] * size
        case "scatter":
            return slices(operands[one], size)
        case _:
            return operands
