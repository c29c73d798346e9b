"""An all-gather over gloo as one broadcast per rank, each straight into its slice of the whole.

gloo's own goes round a ring into memory of its own, made for each call, and is copied from there: a third more CPU, and the
pages of that memory on top. Broadcasts land where they shall. Each rank sends as many bytes in all of them together as in a
ring, but not all ranks at a time: between hosts a ring of more than two keeps every link busy, and broadcasts do not.

    rank 0   [ a | . | . ]  ->  [ a | b | c ]         broadcast of slice 0 from rank 0, of slice 1 from rank 1 ...

Measured (2 cores, 4 and 12 MiB pieces, CPU of a rank): 2 ranks 0.50 and 0.57 of gloo's own, 4 ranks 0.71 and 0.69.

Where the summands of a reduce_scatter arrive, on backends that only move them: two pieces of memory, taken in turn.

    issue 1 -> memory 0      issue 2 -> memory 1      issue 3: wait for 1, sum it -> memory 0 again ...

So the memory of sums under way does not grow with their number, and a steady step makes none. Waiting for the oldest costs
little: the newer one travels meanwhile, and the wire is never idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from threading import Lock
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.comm.collectives.announce import rank_slices
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Work


class CallbackFuture(Protocol):
    """What calls when it is over."""

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Have `callback` called then, or at once."""


class BackendWork(Protocol):
    """What a backend hands back: a `dist.Work`, or several that are one."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Return when it is over; raise RuntimeError when that takes longer, or cannot be."""

    def is_completed(self) -> bool:
        """Whether it is over."""

    def get_future(self) -> CallbackFuture:
        """What calls when it is over."""


class BroadcastWorks:
    """The broadcasts of one all-gather."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """Return when the last slice is in place; each may take `timeout`."""
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether all slices are in place."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> "BroadcastWorks":
        """Itself: it calls when the last slice is in place."""
        return self

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Have `callback` called by whichever thread brings the last slice."""
        left, turn = [len(self._works)], Lock()

        def one_came(future: object) -> None:
            with turn:
                left[0] -= 1
                last = not left[0]
            if last:
                callback(future)

        for work in self._works:
            work.get_future().add_done_callback(one_came)


@torch.no_grad()
def broadcast_all_gather(
    output: torch.Tensor, tensor: torch.Tensor, *, index: int, group: dist.ProcessGroup, async_op: bool
) -> BroadcastWorks:
    """Start to fill flat `output` with every rank's flat `tensor`, in rank order; this rank's own is there at once."""
    pieces = rank_slices(output, group.size())
    if pieces[index].data_ptr() != tensor.data_ptr():
        pieces[index].copy_(tensor)
    works = [
        group.broadcast([piece], _broadcast_options(source, async_op)) for source, piece in enumerate(pieces)
    ]
    return BroadcastWorks(works)


@lru_cache(maxsize=256)
def _broadcast_options(source: int, async_op: bool) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = source
    if "asyncOp" in vars(dist.BroadcastOptions):
        options.asyncOp = async_op
    return options


NUM_RECEIVE_BUFFERS = 2


@dataclass
class _ReceiveBuffer:
    """Bytes, as many as the largest message so far, and the work that fills them."""

    flat: torch.Tensor | None = None
    work: Work | None = None


class ReceiveBuffers:
    """The memory of one group on one rank; its works are waited for here when their memory is needed."""

    def __init__(self) -> None:
        self._buffers = [_ReceiveBuffer() for _ in range(NUM_RECEIVE_BUFFERS)]
        self._num_issued = 0

    def receive(self, like: torch.Tensor, issue: Callable[[torch.Tensor], Work]) -> Work:
        """The work of `issue(arrived)`, which fills `arrived`: flat memory for the elements of `like`, of its dtype."""
        memory = self._buffers[self._num_issued % NUM_RECEIVE_BUFFERS]
        self._num_issued += 1
        if memory.work is not None:
            memory.work.wait()
        if memory.flat is None or memory.flat.numel() < like.nbytes:
            memory.flat = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        memory.work = issue(memory.flat[: like.nbytes].view(like.dtype))
        return memory.work


@torch.no_grad()
def sum_into(output: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    """Fill `output` with the sum of `summands`, added from first to last."""
    ordered_sum(summands, out=output.view(-1))
