"""The network interfaces of this host, and the one that leads to the other ranks.

gloo listens on the address to which the host's own name resolves. On many hosts that is 127.0.1.1, which no
other host can reach, or an address of another network; then every rank waits. The right interface is the one
by which packets to the master leave. Asking the kernel for it sends nothing.
"""

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

EXTERNAL_ADDRESS = "192.0.2.1"  # reserved for documents: the way there is the way out of this host
DISCARD_PORT = 9  # a port is needed to ask for a route


@dataclass(frozen=True)
class NetworkInterface:
    """A network interface that is up, and one of its addresses."""

    name: str
    address: IPv4Address | IPv6Address
    mbit_s: int


def list_interfaces() -> Iterator[NetworkInterface]:
    """Yields the interfaces of this host that are up, once per address; `mbit_s` is 0 where the system does
    not know it.
    """
    stats = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield NetworkInterface(name, ip_address(entry.address.split("%")[0]), stats[name].speed)


def loopback_interface() -> str:
    """Returns the name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def interface_to(address: str) -> str | None:
    """Returns the interface by which this host reaches `address`, or its own if `address` is its own; None
    without one.

    If a name resolves to the loopback here (as a host's own name often does), other hosts do not reach it
    there; its other address is used.
    """
    for target in (address, EXTERNAL_ADDRESS):
        mine = _source_address(target)
        if mine is not None and not mine.is_loopback:
            return next((each.name for each in list_interfaces() if each.address == mine), None)
    return None


def resolve_host(name: str) -> IPv4Address | IPv6Address | None:
    """Returns the address of the host name `name` on this host, IPv4 first; None if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None)
    except OSError:
        return None
    first = min(found, key=lambda each: each[0] != socket.AF_INET)
    return ip_address(str(first[4][0]).split("%")[0])


def _source_address(target: str) -> IPv4Address | IPv6Address | None:
    try:
        routes = socket.getaddrinfo(target, DISCARD_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in routes:
        with suppress(OSError), socket.socket(family, kind, protocol) as asked:
            asked.connect(place)
            return ip_address(asked.getsockname()[0].split("%")[0])
    return None
