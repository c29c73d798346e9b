"""Exchanges the statuses of all ranks through the store of the job, with few requests per rank.

If every rank asked for the status of every other, 1,024 ranks would send two million requests to one server.
So one rank gathers them, the first that asks for a report, and the others read what it concludes:

    rank 0   ... limit!  reporters + 1 = 1   reads say/0 ... say/1023   diagnosis -> report
    rank 1   ... limit!  reporters + 1 = 2   ............................................ reads report
    rank 2   (hangs, or is dead)             its neighbour on its host posts seen/2

If there is no report in time, its maker is gone too, and the next one in order of asking makes it. The keys:

    hosts/HOST      how many ranks of a host have registered: the place of each among them
    born/HOST/3     how the third of them can be observed from there
    born            how many ranks have registered
    say/2, left/2   the status of rank 2; and what it ended with: an error, an exit; or nothing
    seen/2          the status of rank 2 as its neighbour observed it
    reporters       how many ranks have asked for a report; `report` is the one that was made

The ranks of a host stand in a ring, and each observes the next one if that does not answer. So the report
says also of a rank on another host whether its process is gone, or where it stands.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Self

from meshwright.comm.collectives.flight_recorder import open_ring, read_ring
from meshwright.comm.watchdog.hang_report import HangReport
from meshwright.comm.watchdog.process_probe import ProcessProbe
from meshwright.comm.watchdog.rank_status import RankStatus
from meshwright.comm.watchdog.timeout_store_client import StoreClient

POLL_INTERVAL_S = 0.25  # how often a rank looks whether somebody asks; longer where there are many ranks
MAX_RANKS_PER_POLL = 400  # so that the store serves no more than so many looks in `POLL_INTERVAL_S`
ANSWER_TIMEOUT_S = 1.25  # for a rank to answer, after it has looked
OBSERVE_TIMEOUT_S = 1.0  # for its neighbour on another host to observe one that does not
REPORT_TIMEOUT_S = 5.0  # for the report of the rank that asked before
MAX_REPORTERS = 3  # that make a report one after the other; then every rank makes its own
SHORT_POLL_S = 0.03
SETTLE_S = 0.3  # for a process that closed its connections to be gone, and for its last word to arrive
MAX_READABLE_NEIGHBOURS = 64  # ranks of a host that look into each other's memory


@dataclass(frozen=True)
class SharedReport:
    """The report on a hang that all ranks give, and the rank that speaks for them."""

    report: HangReport
    speaker: int

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the report that `to_json` wrote."""
        fields = json.loads(text)
        found = fields["report"]
        return cls(HangReport(found["text"], tuple(found["ranks"]), found["fix"]), fields["speaker"])


class PeerStatuses:
    """The statuses of all ranks of a job, seen from `rank`, whose process others may observe by `probe`."""

    def __init__(self, store: StoreClient, rank: int, world_size: int, probe: ProcessProbe) -> None:
        self._store, self._rank, self._world_size, self._probe = store, rank, world_size, probe
        self._host = probe.host_id or f"of rank {rank}"
        self._neighbours: dict[int, ProcessProbe] = {}  # all ranks of this host, in the order of the ring
        self._rings: dict[int, mmap] = {}
        self._knows_host = False
        self._report: SharedReport | None = None
        slowdown = max(1.0, world_size / MAX_RANKS_PER_POLL)
        self.poll_interval_s, self._short_poll_s = POLL_INTERVAL_S * slowdown, SHORT_POLL_S * slowdown

    @property
    def neighbours(self) -> frozenset[int]:
        """The ranks of this host whose flight recorders can be read even after their death."""
        return frozenset(self._rings)

    @property
    def knows_host(self) -> bool:
        """Whether all ranks of this host are known."""
        return self._knows_host

    def register(self) -> None:
        """Says how this process can be observed. Raises RuntimeError without a store."""
        place = self._store.add(f"hosts/{self._host}", 1)
        birth = json.dumps({"rank": self._rank, "probe": asdict(self._probe)})
        self._store.set(f"born/{self._host}/{place}", birth)
        self._store.add("born", 1)

    def find_neighbours(self) -> None:
        """Reads how the ranks of this host can be observed; opens their flight recorders."""
        if self._knows_host:
            return
        all_born = self._store.add("born", 0) == self._world_size
        while self._store.check([key := f"born/{self._host}/{len(self._neighbours) + 1}"]):
            birth = json.loads(self._store.get(key))
            rank, probe = birth["rank"], ProcessProbe(**birth["probe"])
            self._neighbours[rank] = probe
            if rank != self._rank and probe.recorder_fd is not None:
                is_near = len(self._rings) < MAX_READABLE_NEIGHBOURS
                ring = open_ring(probe.pid, probe.recorder_fd) if is_near else None
                self._rings |= {} if ring is None else {rank: ring}
        self._knows_host = all_born

    def post(self, status: RankStatus) -> None:
        """Posts the status of this rank: its last one if it has exited."""
        self._store.set(f"{'left' if status.condition == 'exited' else 'say'}/{self._rank}", status.to_json())

    def fetch_report(self) -> SharedReport | None:
        """Returns the report if it has been made, and keeps it: the store may be gone soon."""
        try:
            if self._report is None and self._store.check(["report"]):
                self._report = SharedReport.from_json(self._store.get("report"))
        except RuntimeError:
            return None
        return self._report

    def report(
        self, own: RankStatus, diagnose: Callable[[Mapping[int, RankStatus]], SharedReport]
    ) -> SharedReport:
        """Returns the report of the rank that asked first; on that rank, what `diagnose` says of the statuses
        of all ranks, of which `own` is this one's.
        """
        asked_at, number = time.monotonic(), self._count_reporter()
        for _ in self._polls(REPORT_TIMEOUT_S * min(number - 1, MAX_REPORTERS)):
            if (made := self.fetch_report()) is not None:
                return made
            with suppress(RuntimeError):
                self._observe_next(time.monotonic() - asked_at)
        self._report = self._report or diagnose({self._rank: own} | self._gather())
        with suppress(RuntimeError):  # the store may be gone, with the rank that kept it
            self._store.set("report", self._report.to_json())
        return self._report

    def close(self) -> None:
        """Closes the flight recorders of others."""
        for ring in self._rings.values():
            ring.close()

    def _count_reporter(self) -> int:
        try:
            return self._store.add("reporters", 1)
        except RuntimeError:
            return 1

    def _gather(self) -> dict[int, RankStatus]:
        """The statuses of all other ranks: posted by themselves, or observed if they do not answer."""
        found: dict[int, RankStatus] = {}
        missing = [rank for rank in range(self._world_size) if rank != self._rank]
        for elapsed in self._polls(self._answer_timeout_s + OBSERVE_TIMEOUT_S):
            for rank in list(missing):
                status = self._posted_status(rank)
                if status is None and elapsed > SETTLE_S:
                    status = self._observation(rank, elapsed)
                if status is not None:
                    found[rank] = status
                    missing.remove(rank)
            if not missing:
                break
        found |= {rank: self._observed_status(rank) for rank in missing}
        # some fail only after they have answered
        left = {rank: self._read_status(f"left/{rank}") for rank in found}
        # what one leaves with because others failed hides where it was when they missed it
        return found | {rank: each for rank, each in left.items() if each is not None and each.is_root_cause}

    def _observation(self, rank: int, elapsed: float) -> RankStatus | None:
        """Returns the status of a rank that has not answered, as it is observed here or was on its host."""
        if rank not in self._neighbours:
            return self._read_status(f"seen/{rank}")
        if elapsed > self._answer_timeout_s or not self._neighbours[rank].is_alive():
            return self._observed_status(rank)
        return None

    def _observe_next(self, elapsed: float) -> None:
        """Posts the status of the next rank of this host if it does not answer, then of the one after it."""
        ring = list(self._neighbours)
        if elapsed < SETTLE_S or self._rank not in ring:
            return
        place = ring.index(self._rank)
        for rank in (*ring[place + 1 :], *ring[:place]):
            if self._store.check([f"say/{rank}"]) or self._store.check([f"left/{rank}"]):
                return
            status = self._observation(rank, elapsed)
            if status is None:
                return
            self._store.set(f"seen/{rank}", status.to_json())

    def _polls(self, timeout_s: float) -> Iterator[float]:
        """Yields the seconds since the first poll, until `timeout_s` have passed; pauses between two."""
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < timeout_s:
            yield elapsed
            time.sleep(self._short_poll_s)

    @property
    def _answer_timeout_s(self) -> float:
        return ANSWER_TIMEOUT_S + self.poll_interval_s

    def _posted_status(self, rank: int) -> RankStatus | None:
        return self._read_status(f"say/{rank}") or self._read_status(f"left/{rank}")

    def _read_status(self, key: str) -> RankStatus | None:
        try:
            return RankStatus.from_json(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:
            return None

    def _observed_status(self, rank: int) -> RankStatus:
        probe, ring = self._neighbours.get(rank), self._rings.get(rank)
        recent = () if ring is None else tuple(read_ring(ring))
        if probe is None:
            return RankStatus(rank, "silent", collectives=recent)
        state = probe.condition()
        return RankStatus(rank, state, collectives=recent, stack=probe.stack() if state == "silent" else ())
