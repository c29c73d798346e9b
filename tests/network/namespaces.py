"""Network namespaces as hosts: made, shaped, cut and removed with `ip` and `tc`.

A namespace is a name in /run/netns that keeps a network alive, whoever is in it. What it holds goes with it:
when it is deleted, the virtual cables that end in it are gone at both ends. So removing names is all the
cleaning there is, once the processes inside have ended.

    meshwright-host-4711-98765-3fa9c1-0      process number of the maker, when it was started, a word per use,
                                             number of the
                               ...-switch    host; and the bridge between them

A maker that was killed leaves its names. Its number may be another process's by now, but not with the same
start.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshwright.testing.rank_worker import NetworkLocation

PREFIX = "meshwright-host"
NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
MAX_HOSTS = 254  # addresses of the one network that the hosts share
BURST_S, MIN_BURST_NBYTES = 0.0005, 16 << 10
QUEUE_NBYTES = 16 << 20
MAX_SEGMENT_NBYTES, HEADER_MARGIN_NBYTES = 1 << 16, 1 << 11  # the kernel's own limit; for headers
POLL_S = 0.02
LINK_TIMEOUT_S = 10.0  # for a link to come up
KILL_TIMEOUT_S = 10.0  # for a process that was killed to be gone


@dataclass(frozen=True)
class Traffic:
    """The bytes, headers included, that have passed the buckets of a host, out of it and into it."""

    sent_nbytes: int
    received_nbytes: int


@dataclass(frozen=True)
class VirtualHost:
    """One host: its namespace, its address, its port of the switch.

    A plain value: a rank can be given one, and cut it.
    """

    namespace: str
    address: str
    switch: str
    switch_port: str

    @property
    def location(self) -> NetworkLocation:
        """Returns where a worker of this host sits."""
        return NetworkLocation(NAMESPACES / self.namespace, INTERFACE)

    def disconnect(self) -> None:
        """Take the link down, as when its cable is pulled: nothing is refused, nothing arrives."""
        _run_command("ip", "-n", self.switch, "link", "set", self.switch_port, "down")

    def reconnect(self) -> None:
        """Take the link up again; return when packets pass."""
        _run_command("ip", "-n", self.switch, "link", "set", self.switch_port, "up")
        self.await_link()
        # it still waits for answers to what it asked while nothing could come, and asks again only after a
        # second
        _run_command("ip", "-n", self.namespace, "neighbour", "flush", "dev", INTERFACE, "nud", "all")

    def await_link(self) -> None:
        """Return when the kernel has noticed at both ends that the link is up, which it does once a second
        only.

        Raises RuntimeError when that takes too long.
        """
        deadline = time.monotonic() + LINK_TIMEOUT_S
        while not (_is_up(self.namespace, INTERFACE) and _is_up(self.switch, self.switch_port)):
            if time.monotonic() > deadline:
                text = f"the link of {self.namespace} was not up after {LINK_TIMEOUT_S:g} s"
                raise RuntimeError(
                    f"{text}. Needed is a cable that is up at both ends: see `ip -n {self.switch} link`"
                )
            time.sleep(POLL_S)

    def traffic(self) -> Traffic:
        """Returns what has passed the link so far."""
        return Traffic(
            _passed_nbytes(self.namespace, INTERFACE), _passed_nbytes(self.switch, self.switch_port)
        )


def unavailable_reason(delay_ms: float = 0.0) -> str:
    """Returns why hosts (with a delay, if one is asked for) cannot be made here, in words; "" where they can.

    Tries it out.
    """
    if sys.platform != "linux":
        return f"network namespaces are a thing of Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    absent = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} not found (iproute2 has both)"
    name = f"{unique_name()}-trial"
    what = "network namespaces"
    try:
        _run_command("ip", "netns", "add", name)
        what = "bridges"
        _run_command("ip", "-n", name, "link", "add", "switch", "type", "bridge")
        what = "virtual cables (veth)"
        _run_command("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", "peer", "name", "port")
        what = "a delay (netem)" if delay_ms else "a rate (tbf)"
        _shape_traffic(name, INTERFACE, 100, delay_ms)
    except RuntimeError as error:
        return f"this kernel, or this container, has no {what.removeprefix('a ')}: {error}"
    finally:
        if (NAMESPACES / name).exists():
            remove_namespace(name)
    return ""


def unique_name() -> str:
    """A word that no other use has, and that says which process made it."""
    return f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{secrets.token_hex(3)}"


def create_hosts(name: str, num_hosts: int, rate_mbit: float, delay_ms: float) -> list[VirtualHost]:
    """`count` hosts, called `name` and a number, joined by a switch.

    Raises RuntimeError with the words of `ip` or `tc`.
    """
    switch = f"{name}-switch"
    _run_command("ip", "netns", "add", switch)
    _run_command("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
    _run_command("ip", "-n", switch, "link", "set", "switch", "up")
    made = [
        VirtualHost(f"{name}-{index}", f"10.77.0.{index + 1}", switch, f"host{index}")
        for index in range(num_hosts)
    ]
    for each in made:
        own = ("ip", "-n", each.namespace)
        _run_command("ip", "netns", "add", each.namespace)
        _run_command(
            "ip",
            "-n",
            switch,
            "link",
            "add",
            each.switch_port,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            each.namespace,
        )
        # gloo takes the first address of an interface: let there be no second one, of IPv6
        _run_command(*own, "link", "set", INTERFACE, "addrgenmode", "none")
        _run_command(*own, "address", "add", f"{each.address}/24", "dev", INTERFACE)
        # what TCP hands down at once passes the bucket whole; cut into packets there, 1 Gbit/s cost a core,
        # not a tenth of it
        most = min(MAX_SEGMENT_NBYTES, _burst(rate_mbit) - HEADER_MARGIN_NBYTES)
        _run_command(*own, "link", "set", INTERFACE, "gso_max_size", str(most))
        _shape_traffic(each.namespace, INTERFACE, rate_mbit, delay_ms)
        _shape_traffic(switch, each.switch_port, rate_mbit, 0.0)
        _run_command(*own, "link", "set", "lo", "up")
        _run_command(*own, "link", "set", INTERFACE, "up")
        _run_command("ip", "-n", switch, "link", "set", each.switch_port, "master", "switch", "up")
    for each in made:
        each.await_link()
    return made


def _shape_traffic(namespace: str, interface: str, rate_mbit: float, delay_ms: float) -> None:
    bits_per_s = round(rate_mbit * 1e6)
    at = ["root"]
    if delay_ms:
        packets = QUEUE_NBYTES // 64  # more than fit into the queue
        _tc(namespace, interface, *at, "handle", "1:", "netem", "delay", f"{delay_ms}ms", "limit", packets)
        at = ["parent", "1:1"]
    _tc(
        namespace,
        interface,
        *at,
        "tbf",
        "rate",
        f"{bits_per_s}bit",
        "burst",
        _burst(rate_mbit),
        "limit",
        QUEUE_NBYTES,
    )


def _burst(rate_mbit: float) -> int:
    return max(MIN_BURST_NBYTES, round(rate_mbit * 1e6 / 8 * BURST_S))


def _tc(namespace: str, interface: str, *words: object) -> None:
    _run_command("tc", "-n", namespace, "qdisc", "add", "dev", interface, *map(str, words))


def _is_up(namespace: str, interface: str) -> bool:
    return (
        json.loads(_run_command("ip", "-n", namespace, "-j", "link", "show", interface))[0]["operstate"]
        == "UP"
    )


def _passed_nbytes(namespace: str, interface: str) -> int:
    said = json.loads(_run_command("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", interface))
    return next(each["bytes"] for each in said if each["kind"] == "tbf")


def _run_command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` said '{done.stderr.strip()}'. Look at `ip netns`, `dmesg`")
    return done.stdout


def remove_stale() -> None:
    """Remove what makers that are gone have left behind."""
    for name in namespace_names():
        pid, _, born = name.removeprefix(f"{PREFIX}-").partition("-")
        if pid.isdecimal() and _start_time(int(pid)) != born.partition("-")[0]:
            remove_namespace(name)


def namespace_names(prefix: str = PREFIX) -> list[str]:
    """The names that begin with `prefix`, sorted."""
    found = NAMESPACES.iterdir() if NAMESPACES.exists() else ()
    return sorted(each.name for each in found if each.name.startswith(f"{prefix}-"))


def remove_namespace(name: str) -> None:
    """End the processes of the namespace and remove it; nothing where another process does the same."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    with suppress(RuntimeError):  # `ip netns` of a name that has gone meanwhile
        while (inside := _run_command("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in inside:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(POLL_S)
        _run_command("ip", "netns", "delete", name)


def _start_time(pid: int) -> str:
    """Returns when a process was started, in the kernel's ticks since boot; "" when there is none: its number
    alone is used again.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
