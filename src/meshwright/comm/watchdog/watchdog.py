"""Bounds every wait: a rank that reaches the limit asks all ranks for their status.

A collective that does not complete does not name the missing rank. So ranks have a second channel, which
works when collectives do not: the store of their rendezvous. A thread of every rank (a `Watchdog`) polls it a
few times per second.

    rank 0   all_reduce ... waits ... limit!  alarm  ---- reads ---->  report, CollectiveError
    rank 1   all_reduce ... waits ...............  posts its status    report, CollectiveError
    rank 2   (an endless loop) ..................  its thread posts where the loop is

The statuses, and the report that all ranks give, are exchanged by peer_statuses.py.

A rank that fails raises the alarm before its connections close, so the others report its error. A rank that
does not answer in time is observed from outside, on its host. hang_report.py draws the conclusion.

A wait for NCCL does not block, and the main thread is stuck where it reads a number. There the thread reads
the limits off the oldest collective that has not ended (pending_works.py), and it reports and ends the
process, since the main thread hears nothing.

A backend waits like this; `check` raises when the limit is reached or the alarm was raised, and `error_for`
turns an error of the backend into a diagnosis:

    with watchdog.watch_wait(group.ledger.flight_recorder.sequence_id) as wait:
        while not is_done(WAIT_SLICE_S):
            wait.check()
"""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch.distributed as dist

from meshwright.comm.collectives.ledger import Ledger
from meshwright.comm.watchdog.hang_report import diagnose_hang
from meshwright.comm.watchdog.peer_statuses import PeerStatuses, SharedReport
from meshwright.comm.watchdog.pending_works import PendingWorks
from meshwright.comm.watchdog.process_probe import ProbeTarget
from meshwright.comm.watchdog.rank_status import PendingWait, RankStatus, main_thread_stack, traceback_frames
from meshwright.comm.watchdog.timeout_store_client import StoreClient, StoreSilentError
from meshwright.plan.job.errors import PEER_LOST_PATTERN, CollectiveError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import Mesh

WAIT_SLICE_S = 0.25  # how long a body may wait before it asks `check`
ABANDON_AFTER_S = 15.0  # for the main thread to notice that another rank has failed
STUCK_AFTER_S = 3.0  # the same where waits do not block, and the oldest collective has not ended
STORE_LINGER_S = 1.0  # for others to read the report, in a store that the process of rank 0 may keep
SHORT_POLL_S = 0.03  # between polls while the ranks of a small job start, to notice early deaths
SMALL_JOB = 64  # ranks


class Watchdog:
    """Watches the waits of one rank. Without a `store` it cannot reach other ranks, and only the limits hold.

    `limits` are those of the phases that `ledger.phase` names. The thread calls `on_abandon(diagnosis)` if
    the alarm was raised `ABANDON_AFTER_S` ago and the main thread has not reacted; by default it does
    nothing. `pending_works` are those of a backend whose waits do not block.
    """

    on_abandon: Callable[[CollectiveError], None]

    def __init__(
        self, store: dist.Store | None, mesh: Mesh, rank: int, ledger: Ledger, limits: WaitLimits
    ) -> None:
        self.limits, self.on_abandon = limits, _leave_running
        self._mesh, self._rank, self._ledger = mesh, rank, ledger
        self._store = None if store is None else StoreClient.for_rank(store, rank)
        self.pending_works: PendingWorks | None = None
        self._waits: dict[int, tuple[int, float]] = {}  # by thread: the order of the collective, since when
        self._alarmed, self._closed = threading.Event(), threading.Event()
        self._status_lock = threading.Lock()
        self._published_status: RankStatus | None = None
        self._probe_target: ProbeTarget | None = None
        self._peers: PeerStatuses | None = None
        if self._store is not None and mesh.world_size > 1:
            self._probe_target = ProbeTarget(ledger.flight_recorder.move_to_shared_memory())
            self._peers = PeerStatuses(self._store, rank, mesh.world_size, self._probe_target.probe)
            self._peers.register()
            self.pending_works = PendingWorks()
            self._thread = threading.Thread(target=self._serve, daemon=True, name="watchdog")
            self._thread.start()
            atexit.register(self._on_exit)

    @property
    def is_alarmed(self) -> bool:
        """Whether some rank has failed, or has exceeded a limit."""
        return self._alarmed.is_set()

    @property
    def neighbours(self) -> frozenset[int]:
        """The ranks of this host whose flight recorders can be read even after their death."""
        return frozenset() if self._peers is None else self._peers.neighbours

    def watch_wait(self, sequence_id: int) -> "WatchedWait":
        """Returns a context manager for this thread's wait for the collective with this `sequence_id`."""
        return WatchedWait(self, sequence_id)

    def limit_s(self) -> float:
        """Returns how long one wait may last in the present phase."""
        return self.limits.for_phase(self._ledger.phase)

    def announce_exit(self, error: BaseException | None = None) -> None:
        """Tells the others that this rank issues nothing more, and why.

        With an `error` they stop waiting at once.
        """
        if self._peers is None or self._store is None or self._closed.is_set():
            return
        status = replace(self._own_status(), condition="exited")
        if error is not None:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            stack = traceback_frames(error.__traceback__) or status.stack
            status = replace(status, error=text, is_root_cause=not is_secondary_failure(error), stack=stack)
        with suppress(RuntimeError):  # the store may be gone, with the rank that kept it
            self._peers.post(status)
            if error is not None:
                self._store.set("alarm", str(self._rank))

    def close(self) -> None:
        """Ends the thread and closes what was opened; a second call does nothing."""
        if self._probe_target is None or self._peers is None or self._store is None or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._store.close()
        atexit.unregister(self._on_exit)
        self._probe_target.close()
        self._peers.close()

    def diagnose(self, cause: str) -> CollectiveError:
        """Returns the report on all ranks, the same on each; `cause` is what this rank knows by itself."""
        own = self._publish_status()
        if self._peers is not None and self._store is not None:
            with suppress(RuntimeError):
                self._store.set("alarm", str(self._rank))
            shared = self._peers.report(own, self._make_report)
        elif self._mesh.world_size > 1:
            repair = (
                "make the world with meshwright.comm.world.init_world, or initialize "
                "torch.distributed with a store"
            )
            return CollectiveError(
                f"{cause}. The other ranks cannot be asked: this world has no store; {repair}"
            )
        else:
            shared = self._make_report({self._rank: own})
        text = str(shared.report)
        return CollectiveError(f"{text}\n{cause}", report=text, is_reporter=shared.speaker == self._rank)

    def _make_report(self, statuses: Mapping[int, RankStatus]) -> SharedReport:
        speaker = min((rank for rank, each in statuses.items() if each.waits), default=self._rank)
        return SharedReport(diagnose_hang(statuses, self._mesh), speaker)

    def _serve(self) -> None:
        while not self._closed.wait(self._pause_s()):
            try:
                if self._peers is not None:
                    self._peers.find_neighbours()
                if self._is_stuck(self.limit_s()) and self._store is not None:
                    self._store.set("alarm", str(self._rank))
                if self._store is not None and self._store.check(["alarm"]):
                    self._publish_status()
                    self._alarmed.set()
                    break
            except StoreSilentError:  # no word from where the store is kept; there may be one later
                continue
            except RuntimeError:  # the store is gone: so is the rank that kept it, and connections will break
                break
        alarmed_at = time.monotonic()
        while not self._closed.wait(self._pause_s()):
            if self._peers is not None:
                self._peers.fetch_report()
            patience_s = ABANDON_AFTER_S if self._oldest_pending() is None else STUCK_AFTER_S
            if time.monotonic() - alarmed_at > patience_s:
                diagnosis = self.diagnose(f"rank {self._rank} is stuck: another rank failed, or gave up")
                if self._rank == 0:
                    self._closed.wait(STORE_LINGER_S)
                if not self._closed.is_set():
                    self.on_abandon(diagnosis)
                break

    def _oldest_pending(self) -> tuple[int, float] | None:
        return None if self.pending_works is None else self.pending_works.oldest()

    def _is_stuck(self, limit_s: float) -> bool:
        """Whether the oldest collective of a backend whose waits do not block has exceeded the limit."""
        oldest = self._oldest_pending()
        return oldest is not None and oldest[1] > limit_s

    def _pause_s(self) -> float:
        """Seconds until the next poll."""
        if self._peers is None:
            return WAIT_SLICE_S
        is_starting = not self._peers.knows_host and self._mesh.world_size <= SMALL_JOB
        return SHORT_POLL_S if is_starting else self._peers.poll_interval_s

    def _own_status(self) -> RankStatus:
        now = time.monotonic()
        waits = tuple(PendingWait(order, now - since) for order, since in list(self._waits.values()))
        if not waits and (oldest := self._oldest_pending()) is not None:
            waits = (PendingWait(*oldest),)
        ledger = self._ledger
        recent, stack = tuple(ledger.flight_recorder.entries()), main_thread_stack()
        return RankStatus(
            self._rank, "responding", ledger.phase, ledger.step, recent, waits, stack, time_s=time.time()
        )

    def _publish_status(self) -> RankStatus:
        """Posts the status of this rank, once: what it does after the alarm does not matter."""
        with self._status_lock:
            if self._published_status is None:
                self._published_status = self._own_status()
                if self._peers is not None:
                    with suppress(RuntimeError):
                        self._peers.post(self._published_status)
            return self._published_status

    def _on_exit(self) -> None:
        """Runs when the interpreter ends while this is open.

        A script that ended by itself, or with an error.
        """
        error = vars(sys).get("last_value")
        self.announce_exit(
            error
            if isinstance(error, BaseException)
            else SystemExit("its script ended while the world was open")
        )
        self.close()


class WatchedWait:
    """One wait of a thread. While it is entered, the rank's status includes what it waits for.

    And since when.
    """

    __slots__ = ("_sequence_id", "_since", "_thread", "_watchdog")

    def __init__(self, watchdog: Watchdog, sequence_id: int) -> None:
        self._watchdog, self._sequence_id = watchdog, sequence_id

    def __enter__(self) -> Self:
        self._since, self._thread = time.monotonic(), threading.get_ident()
        self._watchdog._waits[self._thread] = (self._sequence_id, self._since)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog._waits.pop(self._thread, None)

    @property
    def remaining_s(self) -> float:
        """Seconds that the wait may still last."""
        return self._since + self._watchdog.limit_s() - time.monotonic()

    def check(self) -> None:
        """Returns if the wait may continue.

        Raises CollectiveError when the limit is reached, or a rank has failed.
        """
        if self.remaining_s <= 0:
            raise self._watchdog.diagnose(
                f"rank {self._watchdog._rank} gave up after {time.monotonic() - self._since:.1f} s"
            )
        if self._watchdog._alarmed.is_set():
            raise self._watchdog.diagnose(
                f"rank {self._watchdog._rank} stopped waiting: another rank failed, or gave up"
            )

    def error_for(self, cause: str) -> CollectiveError:
        """Returns the error to raise when the backend itself gives up; `cause` is its message."""
        return self._watchdog.diagnose(cause)


def wait_until(wait: WatchedWait, is_done: Callable[[float], bool]) -> None:
    """Returns when `is_done(seconds)`, which waits at most so long, is true.

    Raises what `wait.check` raises.
    """
    while not is_done(min(WAIT_SLICE_S, max(0.001, wait.remaining_s))):
        wait.check()


def _leave_running(diagnosis: CollectiveError) -> None:
    """Leave a stuck process to whoever started it."""


def is_secondary_failure(error: BaseException) -> bool:
    """Returns whether `error` only follows from the failure of another rank."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CollectiveError | dist.DistError) or (
            type(cause) is RuntimeError and PEER_LOST_PATTERN.search(str(cause))
        ):
            return True
        cause = cause.__cause__
    return False
