"""Bounds every wait: a rank that reaches the limit asks all ranks for their status.

A collective that does not complete does not name the missing rank. So ranks have a second channel, which
works when collectives do not: the store of their rendezvous. A thread of every rank (a `Watchdog`) polls it a
few times per second.

    rank 0   all_reduce ... waits ... limit!  alarm  ---- reads ---->  report, CollectiveError
    rank 1   all_reduce ... waits ...............  posts its status    report, CollectiveError
    rank 2   (an endless loop) ..................  its thread posts where the loop is

The keys of the store, below a prefix:

    born/2    how rank 2 can be observed from its own host            at the start
    alarm     a wait has exceeded its limit, or a rank has failed     then every rank posts its status
    say/2     the status of rank 2 (rank_status.py)
    left/2    what rank 2 ended with: an error, an exit; or nothing

A rank that fails raises the alarm before its connections close, so the others report its error. A rank that
does not answer within `ANSWER_TIMEOUT_S` is observed from outside if it is on this host. hang_report.py draws
the conclusion.

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
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from mmap import mmap
from types import TracebackType
from typing import Self

import torch.distributed as dist

from meshwright.comm.collectives.flight_recorder import open_ring, read_ring
from meshwright.comm.collectives.ledger import Ledger
from meshwright.comm.watchdog.hang_report import diagnose_hang
from meshwright.comm.watchdog.pending_works import PendingWorks
from meshwright.comm.watchdog.process_identity import host_id
from meshwright.comm.watchdog.process_probe import ProbeTarget, ProcessProbe
from meshwright.comm.watchdog.rank_status import PendingWait, RankStatus, main_thread_stack, traceback_frames
from meshwright.comm.watchdog.timeout_store_client import StoreClient, StoreSilentError
from meshwright.plan.job.errors import PEER_LOST_PATTERN, CollectiveError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import Mesh

WAIT_SLICE_S = 0.25  # how long a body may wait before it asks `check`
POLL_INTERVAL_S = 0.25  # how often a rank looks whether somebody asks; longer where there are many ranks
MAX_RANKS_PER_POLL = 400  # so that the store serves no more than so many looks in `LOOK_S`
ANSWER_TIMEOUT_S = 1.5  # for a rank to answer; its thread needs `LOOK_S`
ABANDON_AFTER_S = 15.0  # for the main thread to notice that another rank has failed
STUCK_AFTER_S = 3.0  # the same where waits do not block, and the oldest collective has not ended
SHORT_POLL_S = 0.03
SETTLE_S = 0.3  # for a process that closed its connections to be gone, and for its last word to arrive
MAX_READABLE_NEIGHBOURS = 64  # ranks of a host that look into each other's memory


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
        self._process_probes: dict[int, ProcessProbe] = {}
        self._rings: dict[int, mmap] = {}
        self._alarmed, self._closed = threading.Event(), threading.Event()
        self._status_lock = threading.Lock()
        self._published_status: RankStatus | None = None
        self._probe_target: ProbeTarget | None = None
        if self._store is not None and mesh.world_size > 1:
            self._probe_target = ProbeTarget(ledger.flight_recorder.move_to_shared_memory())
            self._store.set(f"born/{rank}", json.dumps(asdict(self._probe_target.probe)))
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
        return frozenset(self._rings)

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
        if self._probe_target is None or self._store is None or self._closed.is_set():
            return
        status = replace(self._own_status(), condition="exited")
        if error is not None:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            stack = traceback_frames(error.__traceback__) or status.stack
            status = replace(status, error=text, is_root_cause=not is_secondary_failure(error), stack=stack)
        with suppress(RuntimeError):  # the store may be gone, with the rank that kept it
            self._store.set(f"left/{self._rank}", status.to_json())
            if error is not None:
                self._store.set("alarm", str(self._rank))

    def close(self) -> None:
        """Ends the thread and closes what was opened; a second call does nothing."""
        if self._probe_target is None or self._store is None or self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        self._store.close()
        atexit.unregister(self._on_exit)
        self._probe_target.close()
        for ring in self._rings.values():
            ring.close()

    def diagnose(self, cause: str) -> CollectiveError:
        """Asks every rank for its status and returns the diagnosis.

        `cause` is what this rank knows by itself.
        """
        statements = {self._rank: self._publish_status()}
        if self._store is not None and self._probe_target is not None:
            with suppress(RuntimeError):
                self._store.set("alarm", str(self._rank))
            statements |= self._gather_statuses()
        elif self._mesh.world_size > 1:
            repair = (
                "make the world with meshwright.comm.world.init_world, or initialize "
                "torch.distributed with a store"
            )
            return CollectiveError(
                f"{cause}. The other ranks cannot be asked: this world has no store; {repair}"
            )
        verdict = diagnose_hang(statements, self._mesh)
        speaker = min((rank for rank, each in statements.items() if each.waits), default=self._rank)
        return CollectiveError(f"{verdict}\n{cause}", report=str(verdict), is_reporter=speaker == self._rank)

    def _serve(self) -> None:
        while not self._closed.wait(self._pause_s()):
            try:
                self._find_peers()
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
        while not self._closed.wait(WAIT_SLICE_S):
            patience_s = ABANDON_AFTER_S if self._oldest_pending() is None else STUCK_AFTER_S
            if time.monotonic() - alarmed_at > patience_s:
                diagnosis = self.diagnose(f"rank {self._rank} is stuck: another rank failed, or gave up")
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
        """Seconds until the next poll.

        Shorter while the ranks of a small job start, to notice early deaths.
        """
        coming = len(self._process_probes) < self._mesh.world_size <= MAX_READABLE_NEIGHBOURS
        return (
            SHORT_POLL_S if coming else POLL_INTERVAL_S * max(1.0, self._mesh.world_size / MAX_RANKS_PER_POLL)
        )

    def _find_peers(self) -> None:
        """Reads how the other ranks can be observed; opens the flight recorders of those on this host."""
        if (
            self._store is None
            or len(self._process_probes) == self._mesh.world_size
            or self._mesh.world_size > MAX_RANKS_PER_POLL
        ):
            return
        for rank in range(self._mesh.world_size):
            if rank not in self._process_probes and self._store.check([f"born/{rank}"]):
                probe = ProcessProbe(**json.loads(self._store.get(f"born/{rank}")))
                self._process_probes[rank] = probe
                near = (
                    probe.host_id == host_id()
                    and rank != self._rank
                    and len(self._rings) < MAX_READABLE_NEIGHBOURS
                )
                ring = (
                    open_ring(probe.pid, probe.recorder_fd)
                    if near and probe.recorder_fd is not None
                    else None
                )
                if ring is not None:
                    self._rings[rank] = ring

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
                if self._store is not None and self._probe_target is not None:
                    with suppress(RuntimeError):
                        self._store.set(f"say/{self._rank}", self._published_status.to_json())
            return self._published_status

    def _gather_statuses(self) -> dict[int, RankStatus]:
        """The statuses of all other ranks: posted by themselves, or observed if they do not answer."""
        found: dict[int, RankStatus] = {}
        start = time.monotonic()
        missing = [rank for rank in range(self._mesh.world_size) if rank != self._rank]
        while missing and time.monotonic() - start < ANSWER_TIMEOUT_S:
            for rank in list(missing):
                status = self._reported_status(rank)
                if status is None and time.monotonic() - start > SETTLE_S and self._is_dead(rank):
                    status = self._observed_status(rank)
                if status is not None:
                    found[rank] = status
                    missing.remove(rank)
            if missing:
                time.sleep(SHORT_POLL_S)
        found |= {rank: self._observed_status(rank) for rank in missing}
        left = {
            rank: self._read_status(f"left/{rank}") for rank in found
        }  # some fail only after they have answered
        # what one leaves with because others failed hides where it was when they missed it
        return found | {rank: each for rank, each in left.items() if each is not None and each.is_root_cause}

    def _reported_status(self, rank: int) -> RankStatus | None:
        return self._read_status(f"say/{rank}") or self._read_status(f"left/{rank}")

    def _read_status(self, key: str) -> RankStatus | None:
        try:
            if self._store is not None and self._store.check([key]):
                return RankStatus.from_json(self._store.get(key))
        except RuntimeError:
            return None
        return None

    def _is_dead(self, rank: int) -> bool:
        probe = self._process_probes.get(rank)
        return probe is not None and probe.host_id == host_id() and not probe.is_alive()

    def _observed_status(self, rank: int) -> RankStatus:
        probe, ring = self._process_probes.get(rank), self._rings.get(rank)
        recent = () if ring is None else tuple(read_ring(ring))
        if probe is None or probe.host_id != host_id():
            return RankStatus(rank, "silent", collectives=recent)
        state = probe.condition()
        return RankStatus(rank, state, collectives=recent, stack=probe.stack() if state == "silent" else ())

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
