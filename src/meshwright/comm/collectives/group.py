"""The verbs: collectives over the ranks of some mesh axes, and a ledger of what was really sent.

One interface, three bodies: `distributed` (torch.distributed: gloo, NCCL), `threads` (all ranks in one process, exact
and deterministic), `fake` (one rank of a large job, nothing is sent). Every call names the action it serves, so the
ledger can be held against the program. All tensors are contiguous; sums end with the same bits on every rank.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from meshwright.comm.collectives.flight_recorder import FlightRecorder
from meshwright.plan.job.run_options import RunPhase
from meshwright.plan.sharding.mesh import Mesh

if TYPE_CHECKING:
    from meshwright.comm.collectives.announce import CollectiveCall


@dataclass(frozen=True)
class LedgerEntry:
    """One collective as this rank issued it: for which action, what, over which axes, and bytes it put in and sent.

    `nbytes` is the operand; `sent` is what leaves this rank by the algorithm's formula (n ranks, operand of S bytes):
    all_reduce 2 S (n-1)/n, or what the rounds of its algorithm say, all_gather S (n-1), reduce_scatter and all_to_all
    S (n-1)/n, broadcast S from its source, send and shift S. Of scatter and gather S is the piece of one rank: scatter S (n-1)
    from its source, gather and reduce S from all but the target, which sends nothing.
    """

    action: str
    collective: str
    axes: tuple[str, ...]
    group_size: int
    nbytes: int
    sent_nbytes: float
    algorithm: str = "backend"
    dtype: str = ""


@dataclass
class Ledger:
    """What one rank issued, in order. `entries` grows while `recording`; totals are always kept.

    `recent` are the last collectives, with the lines they were asked from: what is told when the ranks do not meet. `step`
    and `phase` say what they are for; whoever runs the loop keeps them up to date. `compare`, in debug mode, is called with
    each call before it is issued, and raises CollectiveError on every rank of the group unless all of them issue the same;
    what it issues for that itself, while `comparing`, is not compared. With `first_only` that is for the first step.
    """

    is_recording: bool = False
    entries: list[LedgerEntry] = field(default_factory=list)
    sent_nbytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    flight_recorder: FlightRecorder = field(default_factory=FlightRecorder)
    phase: RunPhase = "init"
    step: int | None = None
    is_comparing: bool = False
    compare_first_step_only: bool = False
    check_desync: "Callable[[Group, CollectiveCall], None] | None" = None

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Keep no entries meanwhile: what is issued now is not part of a step."""
        before, self.is_recording = self.is_recording, False
        try:
            yield
        finally:
            self.is_recording = before

    def record(self, entry: LedgerEntry) -> None:
        """Add what `entry` sent to its action's total; keep the entry itself while `recording`."""
        self.sent_nbytes[entry.action] += entry.sent_nbytes
        if self.is_recording:
            self.entries.append(entry)


class Work(ABC):
    """A collective under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the result is in place (on a GPU: when later kernels of this stream will see it)."""

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `call` called once the result has come, by whichever thread learns of it; at once if it is there already.

        On a GPU it is called at once, on a stream that goes on when the result has come.
        """


class Group(ABC):
    """The ranks along some mesh axes, seen from one of them: `index` is this rank's place among `ranks`.

    `device` is where their tensors must be; None where it does not matter. `transport` says what carries the messages: gloo,
    nccl, shared memory, threads, or nothing. All calls have one form: first what is filled, then
    what is read, then by name the one rank that differs from the others, `source` or `target`, as an index in this group.

        call                               goes in              comes out                        sent by each of n ranks
        send(tensor, target=i)             S                    at i, in what it receives into   S
        receive(tensor, source=i)                               tensor: what i sent, S           0
        broadcast(tensor, source=i)        S at i               tensor: that of i, S             S by i, 0 by the others
        scatter(output, tensor, source=i)  n S at i, else None  output: own slice, S             S (n-1) by i, 0 by the others
        gather(output, tensor, target=i)   S                    output at i: all, n S            S by the others, 0 by i
        reduce(tensor, target=i)           S                    tensor at i: the sum, S          S by the others, 0 by i
        all_reduce(tensor)                 S                    tensor: the sum, S               2 S (n-1)/n (*)
        all_gather(output, tensor)         S                    output: all, n S                 S (n-1)
        reduce_scatter(output, tensor)     S                    output: own slice of sum, S/n    S (n-1)/n
        all_to_all(output, tensor)         S                    output: slice i from rank i, S   S (n-1)/n
        shift(output, tensor, by=k)        S                    output: S of index - k, round    S
        barrier()                                                                                0

        S bytes; "all" and slices are flat, in rank order.      (*) another algorithm than the backend's: what its rounds say

    Every call but `barrier` returns a `Work` at once. Until its `wait` the tensors are the collective's: leave them alone.
    `all_reduce(tensor).wait()` is the synchronous form. Several works may be under way, and be waited for in any order; all
    ranks of the group issue the same calls in the same order. `action` says for what, in the ledger and in errors.

    Tensors are contiguous; any shape, also (), and any numel, also 0, which sends nothing. Moves take every dtype; sums take
    float64, float32, bfloat16, float16, int64, int32, int8 and uint8 (integers wrap around). They end with the same bits on every
    rank. A tensor that requires gradients is filled in place, and autograd does not see it: comm/moves.py is differentiable.

    In place: the piece of all_gather, gather and scatter, and the output of reduce_scatter, may be this rank's own slice of the
    whole tensor. Any other overlap is refused.

    A group of one rank sends nothing, and every result is this rank's own. A rank cannot send to itself.

    What does not fit is refused before anything is sent, with ValueError; an algorithm that cannot run, with PlanError.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    ledger: Ledger
    transport: str
    member_indices: tuple[int, ...] = ()  # of the ranks along the axes those at these indices; empty: all
    device: torch.device | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, target: int, action: str = "") -> Work:
        """Send `tensor` to the rank at index `target`, which receives as many elements of the same dtype."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fill `tensor` with what the rank at index `source` sends. What one rank sends another arrives in that order."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sum `tensor` over the group, in place, by one of `comm.algorithms.ALGORITHM_NAMES`."""

    def all_reduce_copy(self, tensor: torch.Tensor, *, action: str = "") -> tuple[torch.Tensor, Work]:
        """New memory of the shape of `tensor`, contiguous, and the all_reduce that fills it with the sum over the group.

        `tensor`, which may have any strides, is left alone; nobody may change it before the work has ended.
        """
        total = tensor.clone(memory_format=torch.contiguous_format)
        return total, self.all_reduce(total, action=action)

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fill `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""

    @abstractmethod
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Send slice i of `tensor` to rank i; slice i of `output` comes from rank i."""

    @abstractmethod
    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Send `tensor` to the rank at index (own + `by`) mod size; `output`, as large, comes from the one at (own - `by`).

        Every rank of the group calls it with the same `by`; a multiple of the size copies, and sends nothing.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrite `tensor` with that of the rank at index `source`."""

    @abstractmethod
    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fill `output` with this rank's slice of the source's `tensor` (size x output.numel() elements; None elsewhere)."""

    @abstractmethod
    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fill the target's `output` (size x tensor.numel() elements; None elsewhere) with all ranks' `tensor`, in rank order."""

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sum `tensor` over the group, in place on the rank at index `target`; the others' may hold anything afterwards."""

    @abstractmethod
    def barrier(self, *, action: str = "") -> None:
        """Return when every rank has come."""


class World(ABC):
    """All ranks of one job, seen from one of them; hands out groups, the same object for the same axes.

    `directed`: what two ranks of a group send each other goes in the order of issue, whatever its direction, as on NCCL; so each
    direction needs a group of its own, in which source and target are `among`, or each could wait for the other to receive.
    """

    serializes_p2p: bool = False
    mesh: Mesh
    rank: int
    ledger: Ledger
    device: torch.device

    @abstractmethod
    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """The group along `axes` that this rank belongs to. Every rank asks for the same axes in the same order.

        With `among`, of the ranks along the axes those at these indices; any other asks too, and gets a group of itself alone.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the world holds; a second call does nothing."""
