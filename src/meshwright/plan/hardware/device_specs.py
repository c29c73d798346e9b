"""Lists known devices and their peak performance: published data in devices.csv, each line with its
source.

With it a speed can be given as a fraction of the peak (MFU, model FLOPs utilization), and a plan can be
estimated before any device is rented. A device that is not in the table, every CPU among them, has no peak:
then a speed is shown in FLOP/s only. Link rates are per device and direction: `link_rate` to the devices of
its own host, `nic_rate` out of it, `host_link_rate` to the memory of its host: 16 lanes of the PCI Express
generation that its source names (3.0: 15.75, 4.0: 31.5, 5.0: 63 GB/s), for GH200 half of NVLink-C2C's 900
GB/s, and nothing for a kind for whose link no source was found. The disk and the memory of a host
(`disk_rate` and `host_memory_rate` for each device, `host_memory` for all devices of a host together) are not
the device's: a file gives them.
"""

import csv
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

DTYPES = ("float16", "bfloat16", "float8", "float4", "float32")


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device: `memory` in bytes, FLOP/s by operand dtype, rates in bytes/s, its number of
    compute units, and the most power that it takes (`watts`; 0: no source was found).

    `host_memory` are the bytes of its host's memory, and `disk_space` those that are free on its host's disk,
    which all devices of the host share. 0 is unknown: a rate, bytes, or devices per host. `pattern` matches
    the name that its driver, or a results table, uses.
    """

    name: str
    pattern: str
    flops: Mapping[str, float]
    memory: float
    memory_rate: float
    link_rate: float
    nic_rate: float
    devices_per_host: int
    num_compute_units: int
    source: str
    watts: float = 0.0
    host_link_rate: float = 0.0
    disk_rate: float = 0.0
    host_memory_rate: float = 0.0
    host_memory: float = 0.0
    disk_space: float = 0.0

    def peak(self, dtype: str) -> float | None:
        """Returns the peak FLOP/s on operands of `dtype`; None if the device does not support it."""
        return self.flops.get(dtype)


@cache
def known_devices() -> tuple[DeviceSpec, ...]:
    """Returns all known devices, in the order in which names are looked up."""
    with (files("meshwright.plan.hardware") / "devices.csv").open(encoding="utf-8") as file:
        return tuple(_device(row) for row in csv.DictReader(file))


def find_device(name: str) -> DeviceSpec | None:
    """Returns the device with this name; None if it is unknown.

    A slice of a device (MIG) is slower than the full device, so it is unknown.
    """
    query = name if "MIG" not in name else ""
    return next(
        (device for device in known_devices() if re.search(device.pattern, query, re.IGNORECASE)), None
    )


def peak_flops(device: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of the device that its driver calls `device`; None if unknown."""
    found = find_device(device)
    return None if found is None else found.peak(dtype)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _device(row: Mapping[str, str]) -> DeviceSpec:
    return DeviceSpec(
        name=row["name"],
        pattern=row["pattern"],
        flops={dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
        memory=float(row["memory_gb"]) * 2**30,  # makers count memory in GiB
        memory_rate=float(row["memory_gb_s"]) * 1e9,
        link_rate=float(row["link_gb_s"]) * 1e9,
        nic_rate=float(row["nic_gb_s"] or 0) * 1e9,
        devices_per_host=int(row["per_host"] or 0),
        num_compute_units=int(row["units"]),
        source=row["source"],
        watts=float(row["watts"] or 0),
        host_link_rate=float(row["host_link_gb_s"] or 0) * 1e9,
    )
