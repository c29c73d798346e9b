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

from meshwright.comm.backends.gloo_paths import BackendWork
from meshwright.comm.collectives.announce import CollectiveCall
from meshwright.comm.collectives.group import Group, Work
from meshwright.comm.watchdog.watchdog import WAIT_SLICE_S, Watchdog, WatchedWait, wait_until
from meshwright.plan.job.errors import CollectiveError

WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)


class CollectiveWait:
    """What a work of torch.distributed serves: the `call` that `group` announced last. `pairwise`: by sends and receives."""

    __slots__ = ("_call", "_group", "_is_p2p", "_on_gloo", "_sequence_id", "_watchdog")

    def __init__(
        self, group: Group, call: CollectiveCall, watchdog: Watchdog, *, on_gloo: bool, is_p2p: bool
    ) -> None:
        self._group, self._call, self._watchdog = group, call, watchdog
        self._on_gloo, self._is_p2p = on_gloo, is_p2p
        self._sequence_id = group.ledger.flight_recorder.sequence_id

    def wait(self, work: BackendWork) -> None:
        """Return when `work` is over. Raises CollectiveError, with who is to blame, when that cannot be or takes too long."""
        with self._watchdog.watch_wait(self._sequence_id) as waiting:
            try:
                if not self._on_gloo:
                    work.wait()
                elif self._is_p2p:
                    work.wait(timedelta(seconds=max(0.001, waiting.remaining_s)))
                else:
                    if not _completes_within(
                        work, WAIT_SLICE
                    ):  # it mostly is: no limit to look up, nothing to make
                        waiting.check()
                        wait_until(
                            waiting, lambda seconds: _completes_within(work, timedelta(seconds=seconds))
                        )
            except CollectiveError:
                raise
            except RuntimeError as error:
                raise self._diagnosed_error(error, waiting) from error

    def error_for(self, error: RuntimeError) -> CollectiveError:
        """What to raise when the backend said `error` as soon as it was asked."""
        with self._watchdog.watch_wait(self._sequence_id) as waiting:
            return self._diagnosed_error(error, waiting)

    def _diagnosed_error(self, error: RuntimeError, waiting: WatchedWait) -> CollectiveError:
        ranks = self._group.ranks
        here = f"rank {ranks[self._group.index]}: {self._call} over {' x '.join(self._group.axes)}"
        return waiting.error_for(f"{here} (ranks {', '.join(map(str, ranks))}) did not complete: {error}")


def _completes_within(work: BackendWork, time: timedelta) -> bool:
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
        self,
        work: BackendWork,
        collective_wait: CollectiveWait,
        keep: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None,
    ) -> None:
        self._work: BackendWork | None = work
        self._collective_wait = collective_wait
        self._keep = keep
        self._finish = finish

    def wait(self) -> None:
        """Return when the result is in place. Raises CollectiveError when a peer is gone or did not come in time."""
        if self._work is None:
            return
        self._collective_wait.wait(self._work)
        if self._finish is not None:
            self._finish()
        self._work, self._keep, self._finish = None, (), None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `call` called when the backend has done its part."""
        if self._work is None:
            callback()
        else:
            self._work.get_future().add_done_callback(lambda future: callback())


class P2PWork(Work):
    """A send or a receive under way, of which gloo tells only those who wait."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._callbacks: list[Callable[[], None]] = []
        self._done = False

    def wait(self) -> None:
        """Return when the tensor has been handed over, or has come. Raises CollectiveError when the peer is gone."""
        self._work.wait()
        self._done = True
        while self._callbacks:
            self._callbacks.pop(0)()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have `call` called by whoever waits."""
        if self._done:
            callback()
        else:
            self._callbacks.append(callback)


class StreamWork(Work):
    """Rounds that were given to a stream of their own; `keep` lives until the wait."""

    def __init__(self, event: torch.cuda.Event, stream: torch.cuda.Stream, keep: torch.Tensor) -> None:
        self._event, self._stream = event, stream
        self._keep: torch.Tensor | None = keep

    def wait(self) -> None:
        """Have later kernels of this stream see the result."""
        torch.cuda.current_stream().wait_event(self._event)
        self._keep = None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `call` on the stream of the rounds."""
        with torch.cuda.stream(self._stream):
            callback()
