"""Checks whether this host can train: one finding per question, each with its repair. Nothing here imports
torch.

    ok        nothing to do
    warning   training works, or works on this host alone; something will be slow, small or exposed
    failure   training cannot work

Checks that need torch (GPUs, a collective) are in `gpu_checks`.
"""

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import psutil

from meshwright.plan.hardware.device_specs import available_cores
from meshwright.run.launch.cluster_env import DEFAULT_PORT
from meshwright.run.launch.network_interfaces import (
    interface_to,
    list_interfaces,
    loopback_interface,
    resolve_host,
)

FindingLevel = Literal["ok", "warning", "failure"]
GIB = 2**30
SUPPORTED_PYTHONS = ((3, 11), (3, 13))
MIN_VERSIONS = MappingProxyType(
    {"torch": (2, 11), "transformers": (5,), "safetensors": (0, 5), "numpy": (1, 26), "psutil": (5, 9)}
)
MIN_SHM_NBYTES, MIN_MEMORY_NBYTES = 256 * 2**20, 2 * GIB
LOW_DISK_NBYTES, MIN_DISK_NBYTES = 10 * GIB, GIB // 2
MAX_CLOCK_SKEW_S = 2.0


@dataclass(frozen=True)
class Finding:
    """The answer to one question: its name, its level, what was found, and the repair unless it is ok."""

    name: str
    level: FindingLevel
    text: str
    fix: str = ""


def host_findings(folder: Path, cache: Path, interface: str | None = None) -> Iterator[Finding]:
    """Yields all findings about this host without torch, for runs in `folder` and downloads in `cache`.

    `interface` is the network interface that GLOO_SOCKET_IFNAME names, or None.
    """
    yield _python()
    yield from (_package(name, least) for name, least in MIN_VERSIONS.items())
    yield _cores()
    yield _memory()
    if sys.platform == "linux":
        yield _shared_memory(Path("/dev/shm"))
    yield disk_finding("disk of runs", folder)
    yield disk_finding("disk of caches", cache)
    yield _file_clock(folder)
    yield _host_name()
    yield _interfaces(interface)
    yield _exposure()
    yield port_finding(DEFAULT_PORT)


def _python() -> Finding:
    here = sys.version_info[:2]
    low, high = (".".join(map(str, each)) for each in SUPPORTED_PYTHONS)
    if SUPPORTED_PYTHONS[0] <= here <= SUPPORTED_PYTHONS[1]:
        return Finding("Python", "ok", platform.python_version())
    return Finding(
        "Python", "failure", f"{platform.python_version()}; needed is {low} to {high}", f"use Python {high}"
    )


def _package(name: str, least: tuple[int, ...]) -> Finding:
    needed = ".".join(map(str, least))
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(
            name, "failure", f"not installed; needed is {needed} or later", f"pip install '{name}>={needed}'"
        )
    parts = found.split("+")[0].split(".")
    numbers = tuple(int(part) for part in parts[: len(least)] if part.isdecimal())
    if numbers < least:
        return Finding(
            name, "failure", f"{found}; needed is {needed} or later", f"pip install '{name}>={needed}'"
        )
    return Finding(name, "ok", found)


def _cores() -> Finding:
    own, every = available_cores(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    text = f"{own} of {every} for this process, load {load:.1f}"
    if load > 1.5 * every:
        return Finding(
            "cores", "warning", text, "stop other processes on this host: ranks wait for the slowest of them"
        )
    return Finding("cores", "ok", text)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < MIN_MEMORY_NBYTES:
        return Finding(
            "memory", "warning", text, "stop other processes on this host, or use one with more memory"
        )
    return Finding("memory", "ok", text)


def _shared_memory(place: Path) -> Finding:
    if not place.is_dir():
        return Finding(
            "shared memory",
            "warning",
            f"there is no {place}",
            "mount it: GPU ranks and data workers use it",
        )
    usage = shutil.disk_usage(place)
    text = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {place}"
    if usage.free < MIN_SHM_NBYTES:
        return Finding(
            "shared memory",
            "warning",
            text,
            "give the container more: --shm-size=8g, or an emptyDir of medium Memory",
        )
    return Finding("shared memory", "ok", text)


def disk_finding(name: str, folder: Path) -> Finding:
    """Checks whether `folder`, which may not exist yet, is writable, and the free space of its disk."""
    place = _find_existing(folder)
    usage = shutil.disk_usage(place)
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {place}"
    if not os.access(place, os.W_OK):
        return Finding(
            name, "failure", f"{place} cannot be written to", "name another folder, or change its owner"
        )
    if usage.free < LOW_DISK_NBYTES:
        fix = (
            "free space: a checkpoint takes 12 bytes per parameter with Adam in float32, and "
            "run.keep of them stay"
        )
        return Finding(name, "failure" if usage.free < MIN_DISK_NBYTES else "warning", text, fix)
    return Finding(name, "ok", text)


def _file_clock(folder: Path) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=_find_existing(folder)) as file:
            behind = time.time() - os.stat(file.name).st_mtime
    except OSError as error:
        return Finding(
            "clock", "warning", f"no file can be made in {folder}: {error.strerror}", "name another folder"
        )
    text = f"{abs(behind):.2f} s from the time of files in {_find_existing(folder)}"
    if abs(behind) > MAX_CLOCK_SKEW_S:
        return Finding("clock", "warning", text, "set the clocks of this host and of the file server by NTP")
    return Finding("clock", "ok", text)


def _host_name() -> Finding:
    name = socket.gethostname()
    address = resolve_host(name)
    if address is None:
        fix = (
            f"add '{name}' to /etc/hosts or the DNS; until then gloo needs GLOO_SOCKET_IFNAME "
            f"(meshwright sets it)"
        )
        return Finding("host name", "warning", f"'{name}' does not resolve", fix)
    only_here = (
        ", which only this host can reach; meshwright tells gloo the interface" if address.is_loopback else ""
    )
    return Finding("host name", "ok", f"{name} is {address}{only_here}")


def _interfaces(run: str | None) -> Finding:
    found = list(list_interfaces())
    names = ", ".join(f"{each.name} {each.address}" for each in found if not each.address.is_link_local)
    if run is not None and run not in {each.name for each in found}:
        fix = "unset GLOO_SOCKET_IFNAME, or name one of these"
        return Finding("interfaces", "failure", f"GLOO_SOCKET_IFNAME={run} is none of {names}", fix)
    out = run or interface_to("192.0.2.1")
    if out is None or out == loopback_interface():
        text = f"{names}; none reaches other hosts: this host can only train alone"
        return Finding(
            "interfaces",
            "ok" if run else "warning",
            text,
            "" if run else "connect it to train on several hosts",
        )
    return Finding(
        "interfaces", "ok", f"{names}; gloo takes {out} between hosts, {loopback_interface()} on one"
    )


def _exposure() -> Finding:
    public = [f"{each.name} {each.address}" for each in list_interfaces() if each.address.is_global]
    ports = sorted(_list_listening_ports())
    text = f"{len(ports)} ports are open to other hosts"
    text += f" ({', '.join(map(str, ports[:8]))}{', ...' if len(ports) > 8 else ''})" if ports else ""
    if public:
        fix = (
            "train behind a firewall: the backends and the stores of torch accept every connection, "
            "and encrypt nothing"
        )
        return Finding("exposure", "warning", f"{text}; {', '.join(public)} is a public address", fix)
    return Finding("exposure", "ok", f"{text}, no address is public")


def _list_listening_ports() -> set[int]:
    try:
        open_now = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS shows them to root only
        return set()
    local = ("127.", "::1")
    places = [each.laddr for each in open_now if each.status == psutil.CONN_LISTEN and each.laddr]
    return {place.port for place in places if not place.ip.startswith(local)}


def port_finding(number: int) -> Finding:
    """Checks whether rank 0 could listen at port `number` of this host."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", number))
        except OSError as error:
            fix = f"export MASTER_PORT={number + 1}, or end what uses it (ss -ltnp shows it)"
            return Finding("port", "warning", f"port {number} cannot be listened at: {error.strerror}", fix)
    return Finding("port", "ok", f"port {number} is free")


def _find_existing(folder: Path) -> Path:
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())
