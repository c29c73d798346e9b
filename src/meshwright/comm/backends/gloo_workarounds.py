"""Collectives that gloo lacks or does slowly.

All-gather by broadcasts, and the receive buffers of reduce-scatter. `broadcast_all_gather` runs an all-gather
as one broadcast per rank, each straight into its slice of the output. gloo's own all-gather goes around a
ring into memory that it allocates for each call, and copies from there: a third more CPU time, and the pages
of that memory on top. Each rank sends the same bytes in total, but not all ranks at the same time: between
hosts a ring of more than two keeps every link busy, and broadcasts do not.

    rank 0   [ a | . | . ]  ->  [ a | b | c ]     broadcast of slice 0 from rank 0, of slice 1 from rank 1 ...

Measured (2 cores, 4 and 12 MiB pieces, CPU of a rank): 2 ranks 0.50 and 0.57 of gloo's own, 4 ranks 0.71 and
0.69.

`ReceiveBuffers` holds the summands of a reduce_scatter that is run as an all-to-all, in two buffers at most.

    issue 1 -> buffer 0      issue 2 -> buffer 1      issue 3: wait for 1, sum it -> buffer 0 again ...
    issue 1 -> buffer 0      wait for 1, sum it       issue 2 -> buffer 0

So memory does not grow with the number of reductions in flight, and a steady step allocates none. Waiting for
the oldest one costs little, because the newer one is in flight meanwhile. Where no two are in flight, such as
one sum at the end of a step, there is one buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from threading import Lock
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.comm.collectives.collective_call import rank_slices
from meshwright.comm.collectives.deterministic_sum import ordered_sum
from meshwright.comm.collectives.group import Work


class CallbackFuture(Protocol):
    """A future that calls back when it is done."""

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Calls `callback` when the work is done, or at once if it is."""


class BackendWork(Protocol):
    """The handle of an issued collective: a `dist.Work`, or several combined."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Returns when it is done. Raises RuntimeError on failure or after `timeout`."""

    def is_completed(self) -> bool:
        """Returns whether it is done."""

    def get_future(self) -> CallbackFuture:
        """Returns the future that calls back when it is done."""


class BroadcastWorks:
    """The broadcasts of one all-gather."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """Returns when the last slice is in place; each broadcast may take `timeout`."""
        for work in self._works:
            work.wait(timeout)

    def is_completed(self) -> bool:
        """Returns whether all slices are in place."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> "BroadcastWorks":
        """Returns itself: it calls back when the last slice is in place."""
        return self

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Calls `callback` in the thread that completes the last slice."""
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
    """Starts to fill flat `output` with every rank's flat `tensor`, in rank order.

    Copies this rank's own slice at once.
    """
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
    flat: torch.Tensor | None = None
    work: Work | None = None
    number: int = 0  # of the work among all

    @property
    def is_free(self) -> bool:
        """Whether nothing that it received is still to be summed."""
        return self.work is None or self.work.is_done


class ReceiveBuffers:
    """The receive buffers of one group on one rank. If all are in use, the oldest work is waited for."""

    def __init__(self) -> None:
        self._buffers = [_ReceiveBuffer() for _ in range(NUM_RECEIVE_BUFFERS)]
        self._num_issued = 0

    def receive(self, like: torch.Tensor, issue: Callable[[torch.Tensor], Work]) -> Work:
        """Returns the work of `issue(buffer)`, which fills a flat buffer with as many elements as `like`.

        Of its dtype.
        """
        oldest = min(self._buffers, key=lambda each: each.number)
        memory = next((each for each in self._buffers if each.is_free), oldest)
        self._num_issued += 1
        memory.number = self._num_issued
        if memory.work is not None:
            memory.work.wait()
        if memory.flat is None or memory.flat.numel() < like.nbytes:
            memory.flat = torch.empty(like.nbytes, dtype=torch.uint8, device=like.device)
        memory.work = issue(memory.flat[: like.nbytes].view(like.dtype))
        return memory.work


@torch.no_grad()
def sum_into(output: torch.Tensor, summands: Sequence[torch.Tensor]) -> None:
    """Fills `output` with the sum of `summands`, added from first to last."""
    ordered_sum(summands, out=output.view(-1))
