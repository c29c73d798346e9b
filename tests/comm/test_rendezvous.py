"""Rendezvous over TCP: ranks of one attempt, at one address, and errors when they do not meet."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshwright.comm import rendezvous as module
from meshwright.comm.rendezvous import RendezvousEndpoint, listen, rendezvous_store
from meshwright.plan.job.errors import CollectiveError, PlanError

WORLD = 3


@pytest.fixture
def here() -> RendezvousEndpoint:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return RendezvousEndpoint("127.0.0.1", free.getsockname()[1], is_single_host=True)


@pytest.fixture
def agent(here: RendezvousEndpoint) -> Iterator[RendezvousEndpoint]:
    """The meeting of a launcher that keeps one store for all attempts, as torchrun does."""
    store = dist.TCPStore(
        here.address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    yield RendezvousEndpoint(
        here.address, store.port, has_external_store=True, is_single_host=True, job_id="r"
    )
    del store


def together(act: Callable[[int], dist.Store]) -> list[dist.Store]:
    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(act, range(WORLD)))


def test_three_ranks_meet_and_share_a_store(here: RendezvousEndpoint):
    stores = together(lambda rank: rendezvous_store(here, rank, WORLD, 10.0))
    stores[2].set("key", "value")
    assert [store.get("key") for store in stores] == [b"value"] * WORLD


def test_ranks_that_are_started_again_see_nothing_of_those_before_them(agent: RendezvousEndpoint):
    for attempt in range(3):
        stores = together(lambda rank: rendezvous_store(agent, rank, WORLD, 10.0))
        assert [store.check(["key"]) for store in stores] == [False] * WORLD
        stores[1].set("key", str(attempt))
        assert [store.get("key") for store in stores] == [str(attempt).encode()] * WORLD


def test_a_rank_that_is_gone_is_not_taken_for_the_one_that_replaces_it(
    agent: RendezvousEndpoint, monkeypatch: pytest.MonkeyPatch
):
    hall = dist.PrefixStore("meshwright/r", dist.TCPStore(agent.address, agent.port, is_master=False))
    for rank in (1, 2):
        hall.set(f"come/{rank}", "stale")
    monkeypatch.setattr(module, "LOG_AFTER_S", 0.0)
    with pytest.raises(
        CollectiveError, match=r"rank 0 waited 0\.2 s at 127\.0\.0\.1:\d+ for ranks 1, 2\. Look for a rank"
    ):
        rendezvous_store(agent, 0, WORLD, 0.2)
    assert len(together(lambda rank: rendezvous_store(agent, rank, WORLD, 10.0))) == WORLD


def test_a_waiting_rank_logs_once_for_whom(agent: RendezvousEndpoint, monkeypatch, caplog):
    monkeypatch.setattr(module, "LOG_AFTER_S", 0.0)
    with pytest.raises(CollectiveError, match=r"rank 1 waited 0\.2 s .* for rank 0"):
        rendezvous_store(agent, 1, WORLD, 0.2)
    assert caplog.messages == [f"rank 1 waits at {agent} for rank 0"]


def test_two_jobs_in_one_store_do_not_meet(agent: RendezvousEndpoint):
    other = RendezvousEndpoint(
        agent.address, agent.port, has_external_store=True, is_single_host=True, job_id="other"
    )
    with ThreadPoolExecutor(1) as pool:
        strange = pool.submit(rendezvous_store, other, 1, 2, 0.5)
        with pytest.raises(CollectiveError, match="for rank 1"):
            rendezvous_store(agent, 0, 2, 0.5)
        assert isinstance(strange.exception(), CollectiveError)


def test_the_store_listens_at_its_address_only(here: RendezvousEndpoint):
    with listen(here) as listening:
        assert listening.getsockname() == ("127.0.0.1", here.port)


def test_a_name_that_means_loopback_here_is_open_to_ranks_from_elsewhere(here: RendezvousEndpoint):
    with listen(RendezvousEndpoint("localhost", here.port)) as listening:
        assert listening.getsockname()[0] in ("0.0.0.0", "::")


def test_an_address_that_is_translated_into_this_host_is_listened_for_everywhere(here: RendezvousEndpoint):
    with listen(RendezvousEndpoint("198.51.100.7", here.port)) as listening:
        assert listening.getsockname() == ("0.0.0.0", here.port)


def test_a_port_in_use_is_named_with_the_repair(here: RendezvousEndpoint):
    text = (
        rf"MASTER_PORT: port {here.port} is in use on 127\.0\.0\.1, where rank 0 "
        rf"listens\n.*export "
        rf"MASTER_PORT={here.port + 1}"
    )
    with socket.create_server((here.address, here.port)), pytest.raises(PlanError, match=text):
        rendezvous_store(here, 0, WORLD, 10.0)


def test_a_name_that_nobody_knows_is_refused():
    with pytest.raises(
        PlanError, match=r"MASTER_ADDR: the address 'no-such-host\.invalid' cannot be resolved on this host"
    ):
        rendezvous_store(RendezvousEndpoint("no-such-host.invalid", 29500), 0, WORLD, 1.0)


def test_a_rank_that_finds_no_store_says_where_it_looked(here: RendezvousEndpoint):
    with pytest.raises(
        CollectiveError, match=rf"rank 1 found no store at {here} within 0\.3 s.*meshwright doctor"
    ):
        rendezvous_store(here, 1, WORLD, 0.3)
