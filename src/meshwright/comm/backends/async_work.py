"""The Work objects of torch.distributed collectives.

And how a process waits for them within the limit of its phase.

    gloo, a collective            the wait is done in slices of a quarter of a second and can be resumed
    gloo, a send or a receive     one wait as long as the limit: after a timeout gloo closes the connections
    NCCL                          the wait orders streams, does not block; torch's watchdog ends the process

When a wait fails or lasts too long, all ranks are asked for their status (comm/watchdog/watchdog.py).
"""

from collections.abc import Callable
from datetime import timedelta

import torch

from meshwright.comm.backends.gloo_workarounds import BackendWork
from meshwright.comm.collectives.collective_call import CollectiveCall
from meshwright.comm.collectives.group import Group, Work
from meshwright.comm.watchdog.watchdog import WAIT_SLICE_S, Watchdog, WatchedWait, wait_until
from meshwright.device.device_streams import current_stream
from meshwright.plan.job.errors import CollectiveError

WAIT_SLICE = timedelta(seconds=WAIT_SLICE_S)


class CollectiveWait:
    """Waits for the backend's work for `call`, the last call that `group` announced.

    `is_p2p`: a send or a receive.
    """

    __slots__ = ("_call", "_group", "_is_p2p", "_on_gloo", "_sequence_id", "_watchdog")

    def __init__(
        self, group: Group, call: CollectiveCall, watchdog: Watchdog, *, on_gloo: bool, is_p2p: bool
    ) -> None:
        self._group, self._call, self._watchdog = group, call, watchdog
        self._on_gloo, self._is_p2p = on_gloo, is_p2p
        self._sequence_id = group.ledger.flight_recorder.sequence_id

    def wait(self, work: BackendWork) -> None:
        """Returns when `work` is done.

        Raises CollectiveError, with a diagnosis, when it fails or takes too long.
        """
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
        """Returns the error to raise when the backend raised `error` at the call itself."""
        with self._watchdog.watch_wait(self._sequence_id) as waiting:
            return self._diagnosed_error(error, waiting)

    def _diagnosed_error(self, error: RuntimeError, waiting: WatchedWait) -> CollectiveError:
        ranks = self._group.ranks
        here = f"rank {ranks[self._group.index]}: {self._call} over {' x '.join(self._group.axes)}"
        return waiting.error_for(f"{here} (ranks {', '.join(map(str, ranks))}) did not complete: {error}")


def _completes_within(work: BackendWork, time: timedelta) -> bool:
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
    """A backend work in flight, with what this rank still has to do when it ends (`finish`).

    `keep` are the tensors that the backend reads or fills: they stay alive until the wait.
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
        """Returns when the result is in place.

        Raises CollectiveError when a peer is gone or did not arrive in time.
        """
        if self._work is None:
            return
        self._collective_wait.wait(self._work)
        if self._finish is not None:
            self._finish()
        self._work, self._keep, self._finish = None, (), None

    @property
    def is_done(self) -> bool:
        """Whether it was waited for, or the backend has completed it and nothing is left to do."""
        return self._work is None or (self._finish is None and self._work.is_completed())

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the backend has completed its part."""
        if self._work is None:
            callback()
        else:
            self._work.get_future().add_done_callback(lambda future: callback())


class P2PWork(Work):
    """A send or a receive in flight; gloo reports its completion only to the thread that waits."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._callbacks: list[Callable[[], None]] = []
        self._done = False

    def wait(self) -> None:
        """Returns when the tensor has been sent or received. Raises CollectiveError when the peer is gone."""
        self._work.wait()
        self._done = True
        while self._callbacks:
            self._callbacks.pop(0)()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done or self._work.is_done

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the thread that waits."""
        if self._done:
            callback()
        else:
            self._callbacks.append(callback)


class StreamWork(Work):
    """An algorithm that runs on a stream of its own; `keep` stays alive until the wait."""

    def __init__(self, event: torch.Event, stream: torch.Stream, keep: object) -> None:
        self._event, self._stream = event, stream
        self._keep: object | None = keep

    def wait(self) -> None:
        """Makes later kernels of the current stream wait for the result."""
        current_stream(self._stream.device).wait_event(self._event)
        self._keep = None

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the stream of the algorithm."""
        with self._stream:
            callback()
