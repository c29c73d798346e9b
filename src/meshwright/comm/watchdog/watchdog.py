"""Nobody waits for ever: a wait has a limit, and whoever reaches it asks all ranks where they are.

Collectives that do not complete say nothing of the rank that is missing. So ranks have a second way to talk, which works when
collectives do not: the store through which they met. Of every rank a thread of its own (a `Lookout`) looks there a few times a
second.

    rank 0   all_reduce ... waits ... limit!  alarm  ---- reads ---->  report, CollectiveError
    rank 1   all_reduce ... waits ...............  says where it is    report, CollectiveError
    rank 2   (an endless loop) ..................  its thread says where the loop is

The keys of the store, below a prefix:

    born/2    how rank 2 can be looked at from its own host           at the start
    alarm     somebody waits in vain, or has failed                   then every rank says where it is
    say/2     the statement of rank 2 (comm/statement.py)
    left/2    what rank 2 ended with: an error, an exit; or nothing

A rank that fails raises the alarm before its connections close, so the others name it and its error. A rank that does not answer
within `ANSWER_S` is looked at from outside if it is on this host. What follows from the statements is for comm/blame.py to say.

A body waits like this; `check` raises when the limit is reached or the alarm was raised, and `failed` turns an error of a backend
into one that says who is to blame:

    with lookout.waiting(group.ledger.recent.order) as waiting:
        while not over(SLICE_S):
            waiting.check()
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

from meshwright.comm.collectives.flight_recorder import opened, read_ring
from meshwright.comm.collectives.group import Ledger
from meshwright.comm.watchdog.hang_report import blame
from meshwright.comm.watchdog.host import host_name
from meshwright.comm.watchdog.rank_status import Birth, Birthmark, Statement, Wait, main_stack, trace_of
from meshwright.comm.watchdog.store_client import Room, Silent
from meshwright.plan.job.errors import PEER_LOST_PATTERN, CollectiveError
from meshwright.plan.job.run_options import WaitLimits
from meshwright.plan.sharding.mesh import Mesh

SLICE_S = 0.25  # how long a body may wait before it asks `check`
LOOK_S = 0.25  # how often a rank looks whether somebody asks; longer where there are many ranks
RANKS_PER_LOOK = 400  # so that the store serves no more than so many looks in `LOOK_S`
ANSWER_S = 1.5  # for a rank to answer; its thread needs `LOOK_S`
ABANDON_S = 15.0  # for the main thread to notice that another rank has failed
POLL_S = 0.03
SETTLE_S = 0.3  # for a process that closed its connections to be gone, and for its last word to arrive
NEIGHBOURS = 64  # ranks of a host that look into each other's memory


class Lookout:
    """What watches over the waits of one rank. Without a `store` it knows of no other rank, and only the limits hold.

    `limits` are those of the phases that `ledger.phase` names. `abandon` is called, by the thread, when the alarm was raised
    `ABANDON_S` ago and the main thread has not come out of whatever it is in; by itself, it does nothing.
    """

    abandon: Callable[[], None]

    def __init__(
        self, store: dist.Store | None, mesh: Mesh, rank: int, ledger: Ledger, limits: WaitLimits
    ) -> None:
        self.limits, self.abandon = limits, _stay
        self._mesh, self._rank, self._ledger = mesh, rank, ledger
        self._store = None if store is None else Room.of(store, rank)
        self._waits: dict[int, tuple[int, float]] = {}  # by thread: the order of the collective, since when
        self._births: dict[int, Birth] = {}
        self._rings: dict[int, mmap] = {}
        self._alarmed, self._over = threading.Event(), threading.Event()
        self._saying = threading.Lock()
        self._said: Statement | None = None
        self._mark: Birthmark | None = None
        if self._store is not None and mesh.world_size > 1:
            self._mark = Birthmark(ledger.recent.share())
            self._store.set(f"born/{rank}", json.dumps(asdict(self._mark.birth)))
            self._thread = threading.Thread(target=self._serve, daemon=True, name="lookout")
            self._thread.start()
            atexit.register(self._ended)

    @property
    def alarmed(self) -> bool:
        """Whether some rank has failed, or waits in vain."""
        return self._alarmed.is_set()

    @property
    def neighbours(self) -> frozenset[int]:
        """The ranks of this host whose last collectives can be read whatever becomes of them."""
        return frozenset(self._rings)

    def waiting(self, order: int) -> "Waiting":
        """The wait of this thread for the collective of that `order` in the ring, to be entered."""
        return Waiting(self, order)

    def limit_s(self) -> float:
        """How long one wait may last in the present phase."""
        return self.limits.for_phase(self._ledger.phase)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank issues nothing more, and why; they stop waiting at once if there is an `error`."""
        if self._mark is None or self._store is None or self._over.is_set():
            return
        statement = replace(self._statement(), state="left")
        if error is not None:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            stack = trace_of(error.__traceback__) or statement.stack
            statement = replace(statement, error=text, own=not is_consequence(error), stack=stack)
        with suppress(RuntimeError):  # the store may be gone, with the rank that kept it
            self._store.set(f"left/{self._rank}", statement.as_json())
            if error is not None:
                self._store.set("alarm", str(self._rank))

    def close(self) -> None:
        """End the thread and let go of what was opened; a second call does nothing."""
        if self._mark is None or self._store is None or self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        self._store.close()
        atexit.unregister(self._ended)
        self._mark.close()
        for ring in self._rings.values():
            ring.close()

    def report(self, cause: str) -> CollectiveError:
        """Ask every rank where it is, and say who is to blame; `cause` is what this rank knows by itself."""
        statements = {self._rank: self._say()}
        if self._store is not None and self._mark is not None:
            with suppress(RuntimeError):
                self._store.set("alarm", str(self._rank))
            statements |= self._gather()
        elif self._mesh.world_size > 1:
            repair = "make the world with meshwright.comm.world.rendezvous, or initialise torch.distributed with a store"
            return CollectiveError(
                f"{cause}. The other ranks cannot be asked: this world knows no store; {repair}"
            )
        verdict = blame(statements, self._mesh)
        speaker = min((rank for rank, each in statements.items() if each.waits), default=self._rank)
        return CollectiveError(f"{verdict}\n{cause}", report=str(verdict), is_reporter=speaker == self._rank)

    def _serve(self) -> None:
        while not self._over.wait(self._pause_s()):
            try:
                self._meet()
                if self._store is not None and self._store.check(["alarm"]):
                    self._say()
                    self._alarmed.set()
                    break
            except Silent:  # no word from where the store is kept; there may be one later
                continue
            except RuntimeError:  # the store is gone: so is the rank that kept it, and connections will break
                break
        if not self._over.wait(ABANDON_S):
            self.abandon()

    def _pause_s(self) -> float:
        """Until the next look; shorter while the ranks of a small job come together, so that an early death is seen too."""
        coming = len(self._births) < self._mesh.world_size <= NEIGHBOURS
        return POLL_S if coming else LOOK_S * max(1.0, self._mesh.world_size / RANKS_PER_LOOK)

    def _meet(self) -> None:
        """Learn how the others can be looked at, as far as they have come; open the rings of those on this host."""
        if (
            self._store is None
            or len(self._births) == self._mesh.world_size
            or self._mesh.world_size > RANKS_PER_LOOK
        ):
            return
        for rank in range(self._mesh.world_size):
            if rank not in self._births and self._store.check([f"born/{rank}"]):
                birth = Birth(**json.loads(self._store.get(f"born/{rank}")))
                self._births[rank] = birth
                near = birth.host == host_name() and rank != self._rank and len(self._rings) < NEIGHBOURS
                ring = opened(birth.pid, birth.ring_fd) if near and birth.ring_fd is not None else None
                if ring is not None:
                    self._rings[rank] = ring

    def _statement(self) -> Statement:
        now = time.monotonic()
        waits = tuple(Wait(order, now - since) for order, since in list(self._waits.values()))
        ledger = self._ledger
        recent, stack = tuple(ledger.recent.issued()), main_stack()
        return Statement(
            self._rank, "answers", ledger.phase, ledger.step, recent, waits, stack, at=time.time()
        )

    def _say(self) -> Statement:
        """What this rank says: made, and told the others, once, because what it does after the alarm is of no interest."""
        with self._saying:
            if self._said is None:
                self._said = self._statement()
                if self._store is not None and self._mark is not None:
                    with suppress(RuntimeError):
                        self._store.set(f"say/{self._rank}", self._said.as_json())
            return self._said

    def _gather(self) -> dict[int, Statement]:
        """The statements of all other ranks: what they say, or what can be seen of those that do not answer."""
        found: dict[int, Statement] = {}
        start = time.monotonic()
        missing = [rank for rank in range(self._mesh.world_size) if rank != self._rank]
        while missing and time.monotonic() - start < ANSWER_S:
            for rank in list(missing):
                heard = self._heard(rank)
                if heard is None and time.monotonic() - start > SETTLE_S and self._is_gone(rank):
                    heard = self._seen(rank)
                if heard is not None:
                    found[rank] = heard
                    missing.remove(rank)
            if missing:
                time.sleep(POLL_S)
        found |= {rank: self._seen(rank) for rank in missing}
        left = {rank: self._read(f"left/{rank}") for rank in found}  # some fail only after they have answered
        # what one leaves with because others failed hides where it was when they missed it
        return found | {rank: each for rank, each in left.items() if each is not None and each.own}

    def _heard(self, rank: int) -> Statement | None:
        return self._read(f"say/{rank}") or self._read(f"left/{rank}")

    def _read(self, key: str) -> Statement | None:
        try:
            if self._store is not None and self._store.check([key]):
                return Statement.of_json(self._store.get(key))
        except RuntimeError:
            return None
        return None

    def _is_gone(self, rank: int) -> bool:
        birth = self._births.get(rank)
        return birth is not None and birth.host == host_name() and not birth.alive()

    def _seen(self, rank: int) -> Statement:
        """What can be seen of a rank that does not answer."""
        birth, ring = self._births.get(rank), self._rings.get(rank)
        recent = () if ring is None else tuple(read_ring(ring))
        if birth is None or birth.host != host_name():
            return Statement(rank, "silent", recent=recent)
        state = birth.state()
        return Statement(rank, state, recent=recent, stack=birth.stack() if state == "silent" else ())

    def _ended(self) -> None:
        """Runs when the interpreter ends while this is open: a script that ended by itself, or by an error."""
        error = vars(sys).get("last_value")
        self.leave(
            error
            if isinstance(error, BaseException)
            else SystemExit("its script ended while the world was open")
        )
        self.close()


class Waiting:
    """One wait of a thread. While it is entered, the rank's statement says what it waits for, and since when."""

    __slots__ = ("_lookout", "_order", "_since", "_thread")

    def __init__(self, lookout: Lookout, order: int) -> None:
        self._lookout, self._order = lookout, order

    def __enter__(self) -> Self:
        self._since, self._thread = time.monotonic(), threading.get_ident()
        self._lookout._waits[self._thread] = (self._order, self._since)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lookout._waits.pop(self._thread, None)

    @property
    def left_s(self) -> float:
        """How much longer it may last."""
        return self._since + self._lookout.limit_s() - time.monotonic()

    def check(self) -> None:
        """Return when it is fine to go on waiting. Raises CollectiveError when the limit is reached, or a rank has failed."""
        if self.left_s <= 0:
            raise self._lookout.report(
                f"rank {self._lookout._rank} gave up after {time.monotonic() - self._since:.1f} s"
            )
        if self._lookout._alarmed.is_set():
            raise self._lookout.report(
                f"rank {self._lookout._rank} stopped waiting: another rank failed, or gave up"
            )

    def failed(self, cause: str) -> CollectiveError:
        """What to raise when the backend itself gives up; `cause` is its own word."""
        return self._lookout.report(cause)


def waited(waiting: Waiting, over: Callable[[float], bool]) -> None:
    """Return when `over(seconds)`, which waits so long at most, says so. Raises what `waiting.check` raises."""
    while not over(min(SLICE_S, max(0.001, waiting.left_s))):
        waiting.check()


def _stay() -> None:
    """Leave a stuck process to whoever started it."""


def is_consequence(error: BaseException) -> bool:
    """Whether `error` only follows from the failure of another rank."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CollectiveError | dist.DistError) or (
            type(cause) is RuntimeError and PEER_LOST_PATTERN.search(str(cause))
        ):
            return True
        cause = cause.__cause__
    return False
