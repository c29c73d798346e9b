"""Brings the ranks of several hosts together through a TCP store.

Under a key that only this attempt of the job knows. torch.distributed exchanges addresses through a key-value
store. torchrun keeps one store for all attempts of a job, so restarted ranks can read what earlier ones
wrote, and wait for processes that are gone. Counting attempts does not help: a host that restarts because
another did counts none. So rank 0 draws a random token, and sends it only to ranks that have just arrived:

    rank 1    come/1 = 77aa          a number drawn by this process
    rank 0    go/77aa = b31f         the token of the attempt; an older rank 1 had another number
    rank 1    here/b31f/1            now rank 0 may continue
    all       everything else under b31f/...

If no launcher keeps a store, rank 0 opens one. torch's own listens on every interface of the host, whatever
address it is given; this one listens on the address of the rendezvous only, because whoever reaches a store
can write to it.
"""

import errno
import logging
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist

from meshwright.plan.job.errors import CollectiveError, PlanError

POLL_S = 0.01  # between looks of a rank; longer where there are many, since one process serves them all
MAX_RANKS_PER_POLL = 128
LOG_AFTER_S = 30.0  # then a rank says for whom it waits
LISTEN_BACKLOG = 2048

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RendezvousEndpoint:
    """The address where ranks meet.

    `has_external_store`: a launcher keeps the store; `is_single_host`: all ranks are local. `job_id`
    separates jobs that share a store.
    """

    address: str
    port: int
    has_external_store: bool = False
    is_single_host: bool = False
    job_id: str = ""

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


class _RendezvousWait:
    def __init__(self, endpoint: RendezvousEndpoint, rank: int, world: int, timeout_s: float) -> None:
        self.endpoint, self.rank, self.timeout_s = endpoint, rank, timeout_s
        self.poll_s = POLL_S * max(1.0, world / MAX_RANKS_PER_POLL)
        self.started_at, self.logged = time.monotonic(), False

    def wait(self, awaited: str) -> None:
        """Sleeps a moment; logs once for whom it waits. Raises TimeoutError when the time is up."""
        waited = time.monotonic() - self.started_at
        if waited > self.timeout_s:
            raise TimeoutError(awaited)
        if waited > LOG_AFTER_S and not self.logged:
            logger.warning("rank %d waits at %s for %s", self.rank, self.endpoint, awaited)
            self.logged = True
        time.sleep(self.poll_s)


def rendezvous_store(endpoint: RendezvousEndpoint, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Returns the store of this attempt, when all of `world` ranks have arrived.

    Raises PlanError when the port is taken on the host of rank 0, CollectiveError when not all arrive within
    `timeout_s`.
    """
    patience = _RendezvousWait(endpoint, rank, world, timeout_s)
    store = _connect_store(endpoint, rank, timeout_s)
    hall = dist.PrefixStore(f"meshwright/{endpoint.job_id}", store)
    try:
        token = _admit_ranks(hall, world, patience) if rank == 0 else _request_admission(hall, rank, patience)
    except RuntimeError as error:
        text = f"rank {rank} lost the store at {endpoint} during the rendezvous ({error})"
        raise CollectiveError(
            f"{text}. Look for the rank that failed first, then start all of them again"
        ) from error
    except TimeoutError as error:
        text = f"rank {rank} waited {timeout_s:g} s at {endpoint} for {error}"
        raise CollectiveError(
            f"{text}. Look for a rank that failed or was not started, then start all of them again"
        ) from error
    return dist.PrefixStore(token, store)


def listen(endpoint: RendezvousEndpoint) -> socket.socket:
    """Returns a socket that listens at the address of `endpoint`.

    On every interface if that is not this host's own. Raises PlanError when the port is taken.
    """
    family, place = _bind_address(endpoint)
    try:
        return _bind_socket(family, place)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise _bind_error(endpoint, error) from error
    # an address that is translated into this host's: that of a Kubernetes service, or of a cloud's router
    try:
        return _bind_socket(socket.AF_INET, ("", endpoint.port))
    except OSError as error:
        raise _bind_error(endpoint, error) from error


def _connect_store(endpoint: RendezvousEndpoint, rank: int, timeout_s: float) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    if rank != 0 or endpoint.has_external_store:
        try:
            return dist.TCPStore(endpoint.address, endpoint.port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            text = f"rank {rank} found no store at {endpoint} within {timeout_s:g} s ({error})"
            fix = (
                "check that rank 0 runs there and that no firewall blocks the port; `meshwright doctor` on "
                "both hosts tells more"
            )
            raise CollectiveError(f"{text}. Rank 0 opens it: {fix}") from error
    with listen(endpoint) as listening:
        fd = listening.detach()  # the store closes it
    return dist.TCPStore(
        endpoint.address,
        endpoint.port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=fd,
    )


def _admit_ranks(store: dist.Store, world: int, wait: _RendezvousWait) -> str:
    """Sends the token of this attempt to every rank that arrives; returns it when all have it."""
    token = secrets.token_hex(8)
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    while missing:
        for rank in sorted(missing):
            if store.check([f"here/{token}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"come/{rank}"]) and (number := store.get(f"come/{rank}")) != answered.get(
                rank
            ):
                store.set(f"go/{number.decode()}", token)
                answered[rank] = number
        if missing:
            shown = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
            wait.wait(f"ranks {shown}" if len(missing) > 1 else f"rank {shown}")
    return token


def _request_admission(store: dist.Store, rank: int, wait: _RendezvousWait) -> str:
    number = secrets.token_hex(8)
    store.set(f"come/{rank}", number)
    # not a blocking get, in which a signal would wait
    while not store.check([f"go/{number}"]):
        wait.wait("rank 0")
    token = store.get(f"go/{number}").decode()
    store.set(f"here/{token}/{rank}", "")
    return token


def _bind_address(endpoint: RendezvousEndpoint) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address that rank 0 binds.

    The endpoint's, unless it resolves to loopback here and ranks are on other hosts.
    """
    try:
        found = socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        fix = "set MASTER_ADDR to a name or number of the host of rank 0 that every host can resolve"
        text = f"the address '{endpoint.address}' cannot be resolved on this host ({error.strerror})"
        raise PlanError(text, fix=fix, location="MASTER_ADDR") from error
    family, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    address = str(place[0])
    if ip_address(address.split("%")[0]).is_loopback and not endpoint.is_single_host:
        address = ""  # Debian maps a host's own name to 127.0.1.1
    return family, (address, endpoint.port)


def _bind_socket(family: socket.AddressFamily, place: tuple[str, int]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(place)
        opened.listen(LISTEN_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _bind_error(endpoint: RendezvousEndpoint, error: OSError) -> PlanError:
    if error.errno == errno.EADDRINUSE:
        text = f"port {endpoint.port} is in use on {endpoint.address}, where rank 0 listens"
        other = endpoint.port + 1 if endpoint.port < 65535 else 29500
        fix = (
            f"choose another, the same on every host: export MASTER_PORT={other}; or end what uses it "
            "(ss -ltnp shows it)"
        )
        return PlanError(text, fix=fix, location="MASTER_PORT")
    text = f"rank 0 cannot listen at {endpoint}: {error.strerror}"
    fix = "set MASTER_ADDR to an address of this host, MASTER_PORT to a port above 1023"
    return PlanError(text, fix=fix, location="MASTER_ADDR")
