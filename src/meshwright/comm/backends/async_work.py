"""How a process waits for what it asked torch.distributed for: in slices, within the limit of the phase.

    gloo, a collective            the wait can be given up and taken up again: a quarter of a second at a time
    gloo, a send or a receive     one wait as long as the limit: when it is late, gloo closes the connections
    NCCL                          the wait orders streams and does not block; a watchdog of torch ends the process

When it fails, or lasts too long, all ranks are asked where they are (comm/stall.py).

What torch.distributed has under way, as the works of a group: a collective, a send or a receive, rounds on a stream.
"""

from collections.abc import Callable
from datetime import timedelta

import torch

from meshwright.comm.backends.gloo_paths import Issued
from meshwright.comm.collectives.announce import Call
from meshwright.comm.collectives.group import Group, Work
from meshwright.comm.watchdog.watchdog import SLICE_S, Lookout, Waiting, waited
from meshwright.plan.job.errors import CollectiveError

SLICE = timedelta(seconds=SLICE_S)


class Asked:
    """What a work of torch.distributed serves: the `call` that `group` announced last. `pairwise`: by sends and receives."""

    __slots__ = ("_call", "_group", "_lookout", "_on_gloo", "_order", "_pairwise")

    def __init__(self, group: Group, call: Call, lookout: Lookout, *, on_gloo: bool, pairwise: bool) -> None:
        self._group, self._call, self._lookout = group, call, lookout
        self._on_gloo, self._pairwise = on_gloo, pairwise
        self._order = group.ledger.recent.order

    def wait(self, work: Issued) -> None:
        """Return when `work` is over. Raises CollectiveError, with who is to blame, when that cannot be or takes too long."""
        with self._lookout.waiting(self._order) as waiting:
            try:
                if not self._on_gloo:
                    work.wait()
                elif self._pairwise:
                    work.wait(timedelta(seconds=max(0.001, waiting.left_s)))
                else:
                    if not _over(work, SLICE):  # it mostly is: no limit to look up, nothing to make
                        waiting.check()
                        waited(waiting, lambda seconds: _over(work, timedelta(seconds=seconds)))
            except CollectiveError:
                raise
            except RuntimeError as error:
                raise self._failed(error, waiting) from error

    def failed(self, error: RuntimeError) -> CollectiveError:
        """What to raise when the backend said `error` as soon as it was asked."""
        with self._lookout.waiting(self._order) as waiting:
            return self._failed(error, waiting)

    def _failed(self, error: RuntimeError, waiting: Waiting) -> CollectiveError:
        ranks = self._group.ranks
        here = f"rank {ranks[self._group.index]}: {self._call} over {' x '.join(self._group.axes)}"
        return waiting.failed(f"{here} (ranks {', '.join(map(str, ranks))}) did not complete: {error}")


def _over(work: Issued, time: timedelta) -> bool:
    """Whether `work` is over within `time`; on gloo, which can be asked again."""
    try:
        work.wait(time)
    except RuntimeError as error:
        if "Operation timed out" not in str(error):
            raise
        if not work.is_completed():
            return False
        work.wait(time)  # it has ended meanwhile: well, or with an error of its own
    return True


class TorchWork(Work):
    """A work of the backend under way, what is left to do on this rank when it ends, and what to say when it fails.

    `keep` are the tensors that the backend reads or fills: they live until the wait.
    """

    def __init__(
        self, work: Issued, asked: Asked, keep: tuple[torch.Tensor, ...], finish: Callable[[], None] | None
    ) -> None:
        self._work: Issued | None = work
        self._asked = asked
        self._keep = keep
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when a peer is gone or did not come in time."""
        if self._work is None:
            return
        self._asked.wait(self._work)
        if self._finish is not None:
            self._finish()
        self._work, self._keep, self._finish = None, (), None

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called when the backend has done its part."""
        if self._work is None:
            call()
        else:
            self._work.get_future().add_done_callback(lambda future: call())


class PairWork(Work):
    """A send or a receive under way, of which gloo tells only those who wait."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._calls: list[Callable[[], None]] = []
        self._over = False

    def wait(self) -> None:
        """Return when the tensor has been handed over, or has come. Raises CollectiveError when the peer is gone."""
        self._work.wait()
        self._over = True
        while self._calls:
            self._calls.pop(0)()

    def then(self, call: Callable[[], None]) -> None:
        """Have `call` called by whoever waits."""
        if self._over:
            call()
        else:
            self._calls.append(call)


class StreamWork(Work):
    """Rounds that were given to a stream of their own; `keep` lives until the wait."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream, keep: torch.Tensor) -> None:
        self._event, self._stream = event, stream
        self._keep: torch.Tensor | None = keep

    def wait(self) -> None:
        """Have later kernels of this stream see the result."""
        torch.cuda.current_stream().wait_event(self._event)
        self._keep = None

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` on the stream of the rounds."""
        with torch.cuda.stream(self._stream):
            call()
