"""Many ranks exchange their statuses: who is named, by how many requests, and if the reporter is gone."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from meshwright.comm.watchdog import peer_statuses
from meshwright.comm.watchdog.hang_report import HangReport
from meshwright.comm.watchdog.peer_statuses import PeerStatuses, SharedReport
from meshwright.comm.watchdog.process_identity import HostProcess
from meshwright.comm.watchdog.process_probe import ProcessProbe
from meshwright.comm.watchdog.rank_status import PendingWait, RankStatus
from meshwright.comm.watchdog.timeout_store_client import StoreClient

RANKS_PER_HOST = 8
ALIVE = HostProcess.current()


def alive_or_dead(statuses: Mapping[int, RankStatus]) -> SharedReport:
    """Says in which condition each rank was found."""
    conditions = Counter(each.condition for each in statuses.values())
    bad = tuple(rank for rank in sorted(statuses) if statuses[rank].condition != "responding")
    return SharedReport(HangReport(str(dict(conditions)), bad, "none"), min(set(statuses) - set(bad)))


@dataclass
class Job:
    """Ranks as threads, 8 on each pretended host; those in `dead` are processes that are gone."""

    size: int
    dead: frozenset[int] = frozenset()
    mute: frozenset[int] = frozenset()
    store: dist.HashStore = field(default_factory=dist.HashStore)
    reports: dict[int, SharedReport] = field(default_factory=dict)
    num_diagnoses: int = 0

    clients: list[StoreClient] = field(default_factory=list)

    def peers(self, rank: int) -> PeerStatuses:
        start = ALIVE.start_time + (rank in self.dead)  # another start: that process is gone
        probe = ProcessProbe(f"host {rank // RANKS_PER_HOST}", os.getpid(), start)
        self.clients.append(StoreClient(self.store))
        return PeerStatuses(self.clients[-1], rank, self.size, probe)

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def run(self, first: int = 0) -> None:
        """All ranks register; those that can, answer, and ask for the report, rank `first` first."""
        peers = {rank: self.peers(rank) for rank in range(self.size)}
        for each in peers.values():
            each.register()
        for rank in sorted(peers.keys() - self.dead - self.mute, key=lambda rank: rank != first):
            peers[rank].find_neighbours()
            peers[rank].post(RankStatus(rank, waits=(PendingWait(1, 2.0),)))
        threads = [
            threading.Thread(target=self.ask, args=(peers[rank], rank))
            for rank in sorted(peers.keys() - self.dead - self.mute, key=lambda rank: rank != first)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.close()

    def ask(self, peers: PeerStatuses, rank: int) -> None:
        own = RankStatus(rank, waits=(PendingWait(1, 2.0),))
        self.reports[rank] = peers.report(own, self.diagnose)

    def diagnose(self, statuses: Mapping[int, RankStatus]) -> SharedReport:
        self.num_diagnoses += 1
        return alive_or_dead(statuses)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The requests to stores from here on; ranks look twice a second."""
    found: Counter[str] = Counter()
    usual = StoreClient._request

    def counting(client: StoreClient, request: Callable[[], object]) -> object:
        found["all"] += 1
        return usual(client, request)

    monkeypatch.setattr(StoreClient, "_request", counting)
    monkeypatch.setattr(peer_statuses, "SHORT_POLL_S", 0.5)
    return found


@pytest.mark.parametrize("size", [16, 64])
def test_all_ranks_give_one_report_by_a_number_of_requests_that_grows_with_the_ranks(
    size: int, requests: Counter[str]
) -> None:
    job = Job(size)
    job.run()
    assert len(job.reports) == size
    assert set(map(str, job.reports.values())) == {str(job.reports[0])}
    assert job.num_diagnoses == 1
    # 4 to register, 2 for each of 8 neighbours, 1 to answer, 3 of the reporter for each rank, 3 for a report
    assert requests["all"] < 40 * size, "each rank asking each other would take 3 x 64 x 63"


def test_a_dead_rank_of_another_host_is_seen_there_also_if_it_is_rank_0(requests: Counter[str]) -> None:
    job = Job(24, dead=frozenset({0, 9, 10}))
    job.run(first=23)
    assert len(job.reports) == 21
    for each in job.reports.values():
        assert each.report.ranks == (0, 9, 10)
        assert each.report.text == "{'responding': 21, 'dead': 3}", "not silent: their neighbours have looked"
        assert each.speaker == 1
    assert job.num_diagnoses == 1


def test_a_rank_that_lives_and_does_not_answer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_statuses, "ANSWER_TIMEOUT_S", 0.2)
    job = Job(16, mute=frozenset({0}))
    job.run(first=15)
    assert {each.report.text for each in job.reports.values()} == {"{'responding': 15, 'silent': 1}"}
    assert {each.report.ranks for each in job.reports.values()} == {(0,)}


def test_the_next_rank_reports_when_the_first_reporter_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_statuses, "REPORT_TIMEOUT_S", 1.0)
    job = Job(16, dead=frozenset({3}))
    job.store.add("reporters", 1)  # rank 3 was the first to ask
    job.run()
    assert len(job.reports) == 15
    assert {each.report.ranks for each in job.reports.values()} == {(3,)}
    assert job.num_diagnoses == 1


def test_without_a_store_each_rank_says_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_statuses, "ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(peer_statuses, "OBSERVE_TIMEOUT_S", 0.1)
    job = Job(2)
    one, two = job.peers(0), job.peers(1)
    for each in (one, two):
        each.register()
    two.find_neighbours()
    job.close()

    def gone(client: StoreClient, request: Callable[[], object]) -> object:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(StoreClient, "_request", gone)
    job.ask(two, 1)
    assert job.reports[1].report.text == "{'responding': 1, 'silent': 1}"


def test_a_report_that_was_seen_is_kept_when_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(2)
    peers = job.peers(1)
    job.store.set("report", SharedReport(HangReport("text", (0,), "fix"), 1).to_json())
    assert peers.fetch_report() is not None
    job.close()

    def gone(client: StoreClient, request: Callable[[], object]) -> object:
        raise RuntimeError("Broken pipe")

    monkeypatch.setattr(StoreClient, "_request", gone)
    monkeypatch.setattr(peer_statuses, "ANSWER_TIMEOUT_S", 0.0)
    job.ask(peers, 1)
    assert job.reports[1] == SharedReport(HangReport("text", (0,), "fix"), 1)


def test_ranks_of_one_host_know_each_other_when_all_are_born() -> None:
    job = Job(10)
    peers = [job.peers(rank) for rank in range(10)]
    for each in peers[:9]:
        each.register()
    peers[0].find_neighbours()
    assert not peers[0].knows_host
    peers[9].register()
    peers[0].find_neighbours()
    assert peers[0].knows_host
    assert list(peers[0]._neighbours) == list(range(8))
    job.close()
