"""Ranks are threads of one process: exact, deterministic, and quick to start.

Ranks meet at a `ThreadHub`. The k-th collective that a rank issues on some ranks pairs with the k-th one of each of
those ranks. A rank that issues one posts its tensors and goes on; the last to come computes the result for all, in
rank order, so that every run and every rank sees the same bits; `wait` returns when that is done.

    rank 0   post ........ wait ......|->
    rank 1      post, wait ...........|->
    rank 2                post+compute|->

Between its call and its wait a rank leaves its tensors alone: they are read, and filled, in place. What a real network
would answer with silence is said here in words: ranks that call different things, a rank that waits for one that never
comes, a rank that fails (`ThreadHub.abort` releases all others at once).

Where ranks that are threads meet: the k-th collective of each of them is one meeting, and the last to come computes it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from threading import Condition, RLock

import torch

from meshwright.comm.algorithms import BACKEND, named
from meshwright.comm.backends.algorithm_player import play_all
from meshwright.comm.backends.fake import FakeGroup
from meshwright.comm.collectives.announce import PAIRWISE, Call, announce, ordered_axes, slices, some
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Group, Ledger, Work, World
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh

Line = tuple[
    bool, tuple[int, ...]
]  # whether one rank sends to another, and the ranks: what they issue there is numbered


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
            self._fail(
                rank,
                f"rank {rank} is stuck: nobody came within {self.timeout_s:g} s.\n{self._table(meeting)}",
            )

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
            last = (
                f"its last call was {self._last[rank]}" if rank in self._last else "it has called nothing yet"
            )
            lines.append(f"  rank {rank}: {state}; {last}")
        elsewhere = [
            rank for rank in range(self.mesh.world_size) if rank not in meeting.ranks and rank in self._last
        ]
        lines += [
            f"  rank {rank} (not in this group): its last call was {self._last[rank]}" for rank in elsewhere
        ]
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
        case "send" | "recv":
            return [operands[0]] * size
        case "all_reduce" | "reduce":
            return [ordered_sum(operands)] * size
        case "all_gather" | "gather":
            return [torch.cat([operand.view(-1) for operand in operands])] * size
        case "reduce_scatter":
            return (
                ordered_sum(pieces)
                for pieces in zip(*(slices(operand, size) for operand in operands), strict=True)
            )
        case "all_to_all":
            return (
                torch.cat(pieces)
                for pieces in zip(*(slices(operand, size) for operand in operands), strict=True)
            )
        case "shift":
            return [operands[(index - one) % size] for index in range(size)]
        case "broadcast":
            return [operands[one]] * size
        case "scatter":
            return slices(operands[one], size)
        case _:
            return operands


class ThreadWork(Work):
    """A meeting that this rank has posted to."""

    def __init__(self, hub: ThreadHub, rank: int, call: Call, meeting: Meeting) -> None:
        self._hub = hub
        self._rank = rank
        self._call = call
        self._meeting = meeting

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when it will never be."""
        self._hub.wait(self._rank, self._call, self._meeting)

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called by the last rank to come."""
        self._hub.when_over(self._meeting, call)


class ThreadGroup(Group):
    """The ranks along `axes`, each of them a thread."""

    transport = "threads"

    def __init__(self, axes: tuple[str, ...], ranks: tuple[int, ...], world: "ThreadWorld") -> None:
        self.axes = axes
        self.ranks = ranks
        self.index = ranks.index(world.rank)
        self.ledger = world.ledger
        self._hub = world.hub
        self._rank = world.rank

    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Send `tensor` to the rank at index `target`; the wait returns when it has received it."""
        return self._post(announce(self, "send", tensor, action=action, source=target), tensor, None)

    def receive(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fill `tensor` with what the rank at index `source` sends."""
        return self._post(announce(self, "recv", tensor, action=action, source=source), tensor, tensor)

    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sum `tensor` over the group, in place: in rank order, or as the rounds of `algorithm` say.

        Raises PlanError for an algorithm that is unknown, or cannot run in this group.
        """
        return self._post(
            announce(self, "all_reduce", tensor, action=action, algorithm=algorithm), tensor, tensor
        )

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""
        return self._post(announce(self, "all_gather", tensor, output, action=action), tensor, output)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""
        return self._post(announce(self, "reduce_scatter", tensor, output, action=action), tensor, output)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""
        return self._post(announce(self, "all_to_all", tensor, output, action=action), tensor, output)

    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, by: int = 1, action: str = "") -> Work:
        """Send `tensor` to the rank `by` places on, round the group; `output` comes from the rank as far behind."""
        return self._post(
            announce(self, "shift", tensor, output, action=action, source=by % self.size), tensor, output
        )

    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source` of the group."""
        return self._post(announce(self, "broadcast", tensor, action=action, source=source), tensor, tensor)

    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""
        call = announce(self, "scatter", output, tensor, action=action, source=source)
        return self._post(call, output if tensor is None else tensor, output)

    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""
        return self._post(
            announce(self, "gather", tensor, output, action=action, source=target), tensor, output
        )

    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group in rank order, in place on the rank at index `target`."""
        call = announce(self, "reduce", tensor, action=action, source=target)
        return self._post(call, tensor, tensor if self.index == target else None)

    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""
        token = torch.empty(0)
        self._post(announce(self, "barrier", token, action=action), token, token).wait()

    def _post(self, call: Call, tensor: torch.Tensor, output: torch.Tensor | None) -> Work:
        return ThreadWork(
            self._hub, self._rank, call, self._hub.post(self._rank, self, Post(call, tensor, output))
        )


class ThreadWorld(World):
    """Rank `rank` of the job that meets at `hub`. It belongs to one thread at a time."""

    def __init__(self, hub: ThreadHub, rank: int, device: torch.device | str = "cpu") -> None:
        self.hub = hub
        self.mesh = hub.mesh
        self.rank = rank
        self.ledger = Ledger()
        self.device = torch.device(device)  # pyrefly: ignore[read-only]  torch.device has a __get__, and is no descriptor here
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], Group] = {}

    def group(self, axes: Iterable[str], among: Sequence[int] = ()) -> Group:
        """The group along `axes`. Raises PlanError for an unknown axis."""
        along = ordered_axes(tuple(axes))
        key = along, tuple(among)
        if key not in self._groups:
            ranks = some(self.mesh.peers(self.rank, along), among, self.rank)
            solo = len(ranks) == 1
            self._groups[key] = (
                FakeGroup(along, ranks, 0, self.ledger) if solo else ThreadGroup(along, ranks, self)
            )
            self._groups[key].among = key[1]
        return self._groups[key]

    def close(self) -> None:
        """Tell the hub that this rank issues nothing more."""
        self.hub.leave(self.rank)


def alone(device: torch.device) -> World:
    """The world of one rank that has no peers, on `device`."""
    return ThreadWorld(ThreadHub(Mesh()), 0, device)
