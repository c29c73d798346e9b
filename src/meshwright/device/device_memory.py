"""Bytes that a device has, has allocated, reserved, and had at most; of the CPU, those of this process, and
those that its host and its memory cgroups leave it.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from meshwright.device.platforms import MPS

if sys.platform != "win32":
    import resource

CGROUP_FILES = {  # of version 1 and of version 2: folder of the mount, limit, usage, and what can be freed
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "": ("", "memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True)
class AllocatorStatistics:
    """What the allocator of a device did since the start: bytes at its peak, by tensors and reserved, and how
    often it had to free its cache and try again.
    """

    peak_allocated: int
    peak_reserved: int
    num_retries: int


def allocator_statistics(device: torch.device) -> AllocatorStatistics | None:
    """Returns the statistics of the allocator of `device`; None where torch keeps none."""
    if device.type == "cpu":
        return None
    found = _statistics(device)
    names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
    return AllocatorStatistics(*(found.get(name, 0) for name in names)) if found else None


def memory_limit(device: torch.device) -> int | None:
    """Returns the memory limit of a process in bytes: of the device, or what the system grants; None without
    one.
    """
    if device.type != "cpu":
        return free_and_total_nbytes(device)[1]
    if sys.platform == "win32":
        return None
    granted = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if granted == resource.RLIM_INFINITY else granted


def free_and_total_nbytes(device: torch.device) -> tuple[int, int]:
    """Returns how many bytes of `device` no process has, and how many it has at all."""
    if device.type == "cpu":
        return free_and_total_host_nbytes()
    if device.type == MPS.type:  # it shares the memory of the host
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    return torch.accelerator.get_memory_info(device)


def available_nbytes(device: torch.device) -> int:
    """Returns how many bytes this process may still use for tensors on `device`: what no process has, and
    what its own allocator has reserved and does not use.
    """
    statistics = {} if device.type == "cpu" else _statistics(device)
    unused = statistics.get("reserved_bytes.all.current", 0) - statistics.get(
        "allocated_bytes.all.current", 0
    )
    return free_and_total_nbytes(device)[0] + max(0, unused)


def free_and_total_host_nbytes(system: Path = Path("/")) -> tuple[int, int]:
    """Returns how many bytes of host memory this process may still take, and how many it could take at all.

    That is the memory of the host, or what its memory cgroups leave, whichever is less. Pages of files that
    were not used lately count as free. `system` is the folder of /proc and /sys.
    """
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in _cgroup_limits(system):
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _cgroup_limits(system: Path) -> Iterator[tuple[int, int]]:
    """Yields the limit and the bytes in use of each memory cgroup that contains this process and has one."""
    entries = _lines(system / "proc/self/cgroup")
    for _, controllers, path in (entry.split(":", 2) for entry in entries if entry.count(":") >= 2):
        if controllers not in CGROUP_FILES:
            continue
        mount, *names, freed_name = CGROUP_FILES[controllers]
        top = system / "sys/fs/cgroup" / mount
        inner = top / path.strip().lstrip("/")
        # in a container the path may be that of its host, and the mount the container's own cgroup
        for folder in (inner, *inner.parents) if inner.is_dir() else (top,):
            limit, used = ("".join(_lines(folder / name)).strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                stat = dict(line.split() for line in _lines(folder / "memory.stat") if line.count(" ") == 1)
                yield int(limit), int(used) - int(stat.get(freed_name, 0))
            if folder == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no cgroup, or not Linux
        return []


def process_nbytes(device: torch.device) -> int:
    """Returns the relevant bytes: allocated on a device; else resident, or with a limited address space all
    of it.
    """
    if device.type != "cpu":
        return _statistics(device).get("allocated_bytes.all.current", 0)
    memory = psutil.Process().memory_info()
    return memory.rss if memory_limit(device) is None else memory.vms


def peak_memory(device: torch.device) -> int:
    """Returns the high-water mark of this process in bytes: allocated on a device, resident on the host."""
    if device.type != "cpu":
        return _statistics(device).get("allocated_bytes.all.peak", 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _statistics(device: torch.device) -> Mapping[str, int]:
    if device.type == MPS.type:  # it keeps no peak
        nbytes = torch.mps.current_allocated_memory()
        return {"allocated_bytes.all.current": nbytes, "allocated_bytes.all.peak": nbytes}
    module: Any = torch.get_device_module(device)
    return module.memory_stats(device)
