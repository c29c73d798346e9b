"""Several hosts on one machine: network namespaces, joined by links of a given rate that can be cut.

A namespace has interfaces, addresses and routes of its own, so processes in it see of the others what they
would see of other machines. A virtual cable leads from each host to a switch, which is a bridge in a
namespace too: nothing is made in the machine's own network, and nothing leaves it.

    host 0                    switch                   host 1         with hosts(2, rate_mbit=100) as pair:
    10.77.0.1 eth0 ===== host0  bridge  host1 ===== eth0 10.77.0.2        pair.run(fn, 2, tensor)
    rank 0, rank 1                                      rank 2, rank 3    pair.cut(1)

A token bucket (tbf) at each end of a cable holds the rate: host -> switch at eth0, switch -> host at the
switch's port. So all ranks of a host share what it sends, and likewise what it receives. The bucket holds
half a millisecond of the rate, at least 16 KiB: a message of 64 KiB gets no more than a quarter for nothing
at 100 Mbit/s. Packets wait, none is dropped (up to 16 MiB). A delay needs the kernel's netem. Ranks of one
host reach each other at the host's address; the kernel leads that through loopback, past the buckets, as fast
as the machine is.

Everything is removed at the end of `with`, after an error too. Who is killed with -9 cannot remove anything:
the names say which process made them, and the next use removes what makers that are gone have left, processes
included.
Limits: Linux, root, iproute2 (`missing` says why not). The hosts share the CPU: a rate that it cannot carry
is not reached (2 cores carried 1 Gbit/s). A TCP connection gets 95 % of the rate, the rest are headers. A
store's complaint that the hostname of a client cannot be retrieved is true, and harmless: these hosts have no
names.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count as counting
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool
from tests.network.namespaces import (
    MAX_HOSTS,
    VirtualHost,
    create_hosts,
    namespace_names,
    remove_namespace,
    remove_stale,
    unavailable_reason,
    unique_name,
)

Result = TypeVar("Result")

FIRST_PORT = 29500  # each meeting has a port of its own: what is left of a failed one disturbs nobody
POLL_S = 0.02
UNSET_INTERFACES = ("-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME")
MAX_OUTPUT_NBYTES = 16 << 20  # bytes of the output of a rank that are returned


@dataclass(frozen=True)
class ProcessResult:
    """The result of one rank of a command: its exit code (negative: the signal that killed it), stdout and
    stderr together.
    """

    rank: int
    host: int
    exit_code: int
    output: str


class VirtualHosts(Sequence[VirtualHost]):
    """The hosts of a `with hosts(...)`, by number."""

    def __init__(self, hosts: Sequence[VirtualHost]) -> None:
        self._hosts = tuple(hosts)
        self._ports = counting(FIRST_PORT)
        self._pool: ProcessPool | None = None
        self._per_host = 0

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, host: int) -> VirtualHost:  # pyrefly: ignore[bad-override]  a slice of hosts means nothing
        return self._hosts[host]

    def disconnect(self, host: int) -> None:
        """Take the link of `host` down; the others still reach each other."""
        self[host].disconnect()

    def reconnect(self, host: int) -> None:
        """Take the link of `host` up again."""
        self[host].reconnect()

    def run(
        self, fn: Callable[..., Result], ranks_per_host: int, *args: object, timeout_s: float = 60.0
    ) -> list[Result]:
        """The results of `fn(world, *args)`, in rank order, each rank a gloo process on its host; as
        `ProcessPool.run` else.

        Hosts are the axis dp_replicate, the ranks of a host the axis dp_shard, so that ranks 0 to
        `ranks_per_host` - 1 are on host 0. Workers are kept from call to call while `ranks_per_host` stays.
        Raises RankFailure when a rank fails, dies, or has not ended after `timeout_s`; PlanError for less
        than one rank.
        """
        mesh = self._mesh(ranks_per_host)
        if self._pool is None or self._per_host != ranks_per_host:
            self.close()
            self._pool = ProcessPool(
                mesh.world_size, [self[rank // ranks_per_host].location for rank in range(mesh.world_size)]
            )
            self._per_host = ranks_per_host
        meeting = RendezvousEndpoint(self[0].address, next(self._ports))
        return self._pool.run(fn, mesh, *args, timeout_s=timeout_s, endpoint=meeting)

    def run_command(
        self,
        argv: Sequence[str | Path],
        ranks_per_host: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float = 300.0,
    ) -> list[ProcessResult]:
        """Returns how `argv` ended on every rank, in rank order; run in `folder`, with `env` added to this
        process's environment.

        What that says of interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) is left out: a host has its own.
        Each rank finds what torchrun would tell it: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        GROUP_RANK, MASTER_ADDR and MASTER_PORT. Who has not ended after `timeout_s` is killed, and so has the
        exit code -9. Raises PlanError for less than one rank per host.
        """
        mesh = self._mesh(ranks_per_host)
        port = next(self._ports)
        running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        with ExitStack() as opened:
            for rank in range(mesh.world_size):
                host, local = divmod(rank, ranks_per_host)
                said = {
                    "RANK": rank,
                    "WORLD_SIZE": mesh.world_size,
                    "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": ranks_per_host,
                }
                said |= {"GROUP_RANK": host, "MASTER_ADDR": self[0].address, "MASTER_PORT": port}
                variables = [f"{key}={value}" for key, value in {**(env or {}), **said}.items()]
                words = [
                    "ip",
                    "netns",
                    "exec",
                    self[host].namespace,
                    "env",
                    *UNSET_INTERFACES,
                    *variables,
                    *map(str, argv),
                ]
                output = opened.enter_context(TemporaryFile())
                process = _start_process(words, output, folder)
                opened.callback(_exit_code, process)
                running.append((process, output))
            _wait_for_all([process for process, _ in running], timeout_s)
            codes = [_exit_code(process) for process, _ in running]
            texts = [
                os.pread(output.fileno(), MAX_OUTPUT_NBYTES, 0).decode(errors="replace")
                for _, output in running
            ]
        return [
            ProcessResult(rank, rank // ranks_per_host, *found)
            for rank, found in enumerate(zip(codes, texts, strict=True))
        ]

    def close(self) -> None:
        """End the workers. A later `run` starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _mesh(self, ranks_per_host: int) -> Mesh:
        return Mesh(dp_replicate=len(self), dp_shard=ranks_per_host)


@contextmanager
def virtual_hosts(num_hosts: int, rate_mbit: float, delay_ms: float = 0.0) -> Iterator[VirtualHosts]:
    """`count` hosts with links of `rate_mbit` million bits per second each way, `delay_ms` from one host to
    another.

    Raises PlanError where that cannot be made (`missing` says why), and for numbers that make no sense.
    """
    if not (1 <= num_hosts <= MAX_HOSTS and rate_mbit > 0 and delay_ms >= 0):
        given = f"hosts({num_hosts}, rate_mbit={rate_mbit:g}, delay_ms={delay_ms:g})"
        raise PlanError(
            f"{given}; needed are 1 to {MAX_HOSTS} hosts and a rate above 0",
            fix="hosts(2, rate_mbit=100)",
            location="hosts",
        )
    why = unavailable_reason(delay_ms)
    if why:
        fix = "run it as root on a Linux with iproute2" + (", or without a delay" if delay_ms else "")
        raise PlanError(f"hosts cannot be made here: {why}", fix=fix, location="hosts")
    remove_stale()
    name = unique_name()
    made: VirtualHosts | None = None
    try:
        made = VirtualHosts(create_hosts(name, num_hosts, rate_mbit, delay_ms))
        yield made
    finally:
        if made is not None:
            made.close()
        for each in namespace_names(name):
            remove_namespace(each)


def _start_process(words: Sequence[str], output: IO[bytes], folder: Path | None) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(words, cwd=folder, start_new_session=True, **streams)


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; if it still runs, it is killed with whatever it has started in its session."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
