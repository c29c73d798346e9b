"""The collectives: their interface over the ranks of some mesh axes.

One interface, three backends: torch.distributed (gloo, NCCL), threads (all ranks in one process, exact and
deterministic), fake (one rank of a large job, nothing is sent). Every call names the action it serves, so the
ledger can be compared with the program. All tensors are contiguous; sums end with the same bits on every
rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from meshwright.comm.collectives.ledger import Ledger
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh

GroupKey = tuple[tuple[str, ...], tuple[int, ...]]  # axes, and member indices along them; () means all
PeerTensors = list[tuple[int, torch.Tensor]]  # the index of the peer, and flat memory
Rounds = Iterator[tuple[PeerTensors, PeerTensors]]  # by round: what this rank sends, where it receives


class ExchangedMessage(NamedTuple):
    """A collective that rounds of sends and receives carry out, with the bytes of its input.

    It runs among `num_ranks` ranks of the group; 0: all. `root` is the index of the one rank that a broadcast
    or scatter begins at, or a gather or reduce ends at.
    """

    collective: str
    nbytes: int
    dtype: str
    num_ranks: int = 0
    root: int = 0


class Work(ABC):
    """A collective in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the result is in place (on a GPU: when later kernels of this stream will see it)."""

    @property
    def is_done(self) -> bool:
        """Whether the result is known to be in place, without waiting; False if it is not known."""
        return False

    @abstractmethod
    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the result is in place, in the thread that notices it.

        At once if it already is. On a GPU it is called at once, on a stream that continues when the result is
        in place.
        """


class Group(ABC):
    """The ranks along some mesh axes, seen from one of them: `index` is this rank's position among `ranks`.

    `device` is where their tensors must be; None if it does not matter. `transport` names what carries the
    messages: gloo, nccl, shared memory, threads, or nothing. All calls have one form: first the output, then
    the input, then by name the one rank that differs from the others, `source` or `target`, as an index in
    this group.

        call                               input                output                           sent per
                                                                rank, n ranks
        send(tensor, target=i)             S                    at i, in its recv                S
        recv(tensor, source=i)                                  tensor: what i sent, S           0
        recv_any(tensor)                                        tensor: what came first, S       0
        broadcast(tensor, source=i)        S at i               tensor: that of i, S             S by i, else
                                                                0
        scatter(output, tensor, source=i)  n S at i, else None  output: own slice, S             S (n-1) by i,
                                                                else 0
        gather(output, tensor, target=i)   S                    output at i: all, n S            0 by i, else
                                                                S
        reduce(tensor, target=i)           S                    tensor at i: the sum, S          0 by i, else
                                                                S
        all_reduce(tensor)                 S                    tensor: the sum, S               2 S (n-1)/n
                                                                (*)
        all_gather(output, tensor)         S                    output: all, n S                 S (n-1)
        reduce_scatter(output, tensor)     S                    output: own slice of sum, S/n    S (n-1)/n
        all_to_all(output, tensor)         S                    output: slice i from rank i, S   S (n-1)/n
        all_to_all_v(output, tensor, ...)  S, rows for others   output: rows from others         S
        shift(output, tensor, offset=k)    S                    output: S of index - k (mod n)   S
        exchange(rounds, messages)         what `rounds` yields                                  of messages
        barrier()                                                                                0

        S bytes; "all" and slices are flat, in rank order.   (*) a named algorithm: the sum over its rounds

    Every call but `recv_any` and `barrier` returns a `Work` at once. Until its `wait` the tensors belong to
    the collective: leave them alone. `all_reduce(tensor).wait()` is the synchronous form. Several works may
    be in flight, and be waited for in any order; all ranks of the group issue the same calls in the same
    order. `action` names the action in the ledger and in errors.

    Tensors are contiguous; any shape, also (), and any numel, also 0, which sends nothing. Collectives that
    only move data take every dtype; sums take float64, float32, bfloat16, float16, int64, int32, int8 and
    uint8 (integers wrap around). They end with the same bits on every rank. A tensor that requires gradients
    is filled in place, invisible to autograd; redistribute.py is differentiable.

    In place: the local slice of all_gather, gather and scatter, and the output of reduce_scatter, may be a
    view of the full tensor at this rank's index. Any other overlap is refused.

    A group of one rank sends nothing, and every result is this rank's own. A rank cannot send to itself.

    Invalid tensors are refused with ValueError before anything is sent; an algorithm that cannot run, with
    PlanError.
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
        """Sends `tensor` to the rank at index `target`, which receives as many elements of the same dtype."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, *, source: int, action: str = "") -> Work:
        """Fills `tensor` with what the rank at index `source` sends.

        Messages between two ranks arrive in order.
        """

    def recv_any(self, tensor: torch.Tensor, *, action: str = "") -> int:
        """Fills `tensor` with what any other rank sends, and returns the index of that rank.

        It returns when the message is there: of several, that of the rank that came first. Raises PlanError
        where messages are received from a rank that is named, as on NCCL.
        """
        text = f"{action or 'a rank'} receives from whichever rank comes first, and {self.transport} does not"
        raise PlanError(text, fix="run on CPUs, whose messages gloo carries", location="strategies")

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, action: str = "", algorithm: str = "backend") -> Work:
        """Sums `tensor` over the group, in place, by one of `comm.algorithms.ALGORITHM_NAMES`."""

    def all_reduce_copy(self, tensor: torch.Tensor, *, action: str = "") -> tuple[torch.Tensor, Work]:
        """Returns a new contiguous tensor of the shape of `tensor`.

        And the all_reduce that fills it with the sum. `tensor`, which may have any strides, is not changed;
        nobody may change it before the work has ended.
        """
        total = tensor.clone(memory_format=torch.contiguous_format)
        return total, self.all_reduce(total, action=action)

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` (size x tensor.numel() elements) with every rank's `tensor`, in rank order."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Fills `output` with this rank's slice of the sum of `tensor` (size x output.numel() elements)."""

    @abstractmethod
    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, *, action: str = "") -> Work:
        """Sends slice i of `tensor` to rank i; slice i of `output` comes from rank i."""

    @abstractmethod
    def all_to_all_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        action: str = "",
    ) -> Work:
        """Sends `input_splits[i]` rows of `tensor` to rank i; `output_splits[i]` rows come from rank i.

        Rows lie along dim 0, in rank order, and have one shape on all ranks. How many there are differs from
        rank to rank; both ends of a pair know it, and the split of the own rank is 0.
        """

    @abstractmethod
    def shift(self, output: torch.Tensor, tensor: torch.Tensor, *, offset: int = 1, action: str = "") -> Work:
        """Sends `tensor` to the rank at (index + `offset`) mod size.

        `output` comes from the one at (index - `offset`). Every rank of the group passes the same `offset`; a
        multiple of the size copies, and sends nothing.
        """

    @abstractmethod
    def exchange(self, rounds: Rounds, messages: Sequence[ExchangedMessage], *, action: str = "") -> Work:
        """Runs `rounds` beside the computation: between two messages a rank may compute on what has arrived.

        `rounds` yields what this rank sends and where it receives, as flat tensors, and continues when all of
        that has been delivered; all ranks yield the matching rounds. Together they carry out the collectives
        `messages`, which the ledger records; bytes that differ from them are an error. Work that ends has run
        `rounds` to its end.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, *, source: int = 0, action: str = "") -> Work:
        """Overwrites `tensor` with that of the rank at index `source`."""

    @abstractmethod
    def scatter(
        self, output: torch.Tensor, tensor: torch.Tensor | None, *, source: int = 0, action: str = ""
    ) -> Work:
        """Fills `output` with this rank's slice of the source's `tensor` (size x output.numel() elements;
        None elsewhere).
        """

    @abstractmethod
    def gather(
        self, output: torch.Tensor | None, tensor: torch.Tensor, *, target: int = 0, action: str = ""
    ) -> Work:
        """Fills the target's `output` (size x tensor.numel() elements;
        None elsewhere) with all `tensor`s in rank order.
        """

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, *, target: int = 0, action: str = "") -> Work:
        """Sums `tensor` over the group into that of the rank at index `target`.

        The others' content is undefined.
        """

    @abstractmethod
    def barrier(self, *, action: str = "") -> None:
        """Returns when every rank has arrived."""


class World(ABC):
    """All ranks of one job, seen from one of them; creates groups, the same object for the same axes.

    `serializes_p2p`: messages between two ranks of a group run in the order of issue, whatever their
    direction, as on NCCL; so each direction needs its own group, with source and target as members, or both
    ranks could wait for the other to receive.
    """

    serializes_p2p: bool = False
    mesh: Mesh
    rank: int
    ledger: Ledger
    device: torch.device

    @abstractmethod
    def group(self, axes: Iterable[str], member_indices: Sequence[int] = ()) -> Group:
        """Returns the group along `axes` that this rank belongs to.

        Every rank asks for the same axes in the same order. With `member_indices` the group has only the
        ranks at these indices; any other rank calls it too, and gets a group of itself alone.
        """

    def create_groups(self, keys: Iterable[GroupKey]) -> None:
        """Creates the groups of `keys` ahead of their first use; all ranks call it
        with the same keys.
        """
        for axes, member_indices in sorted(keys):
            self.group(axes, member_indices)

    @abstractmethod
    def close(self) -> None:
        """Releases the resources of the world; a second call does nothing."""
