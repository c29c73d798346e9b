"""What known devices are and can do at most: facts of their makers, in devices.csv, each line with its source.

A speed can then be said as a share of the peak (mfu, model FLOPs utilisation), and a plan be priced before any device is rented.
A device that is not in the table, every CPU among them, has no peak here: then a speed is shown as it is, in FLOP/s, and no share
is made up. Rates of links are in one direction and per device: `link_rate` to the devices of its own host, `nic_rate` out of it.
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
    """A kind of device: its `memory` in bytes, FLOP/s by dtype of the operands, bytes/s, its hosts, and how many `units` compute.

    `pattern` is what its driver, or a table of results, calls it.
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

    def peak(self, dtype: str) -> float | None:
        """The most floating-point operations per second on operands of `dtype`; None where it has none for it."""
        return self.flops.get(dtype)


@cache
def known_devices() -> tuple[DeviceSpec, ...]:
    """All that are known, in the order in which a name is looked up."""
    with (files("meshwright.plan.hardware") / "devices.csv").open(encoding="utf-8") as file:
        return tuple(_device(line) for line in csv.DictReader(file))


def find_device(name: str) -> DeviceSpec | None:
    """The device that its driver (or a person) calls so; None when it is unknown.

    A slice of a device (MIG) can do less than the whole, so it is unknown.
    """
    words = name if "MIG" not in name else ""
    return next((each for each in known_devices() if re.search(each.pattern, words, re.IGNORECASE)), None)


def peak_flops(device: str, dtype: str) -> float | None:
    """The most floating-point operations per second of the device that its driver calls `device`; None when unknown."""
    found = find_device(device)
    return None if found is None else found.peak(dtype)


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _device(line: Mapping[str, str]) -> DeviceSpec:
    return DeviceSpec(
        name=line["name"],
        pattern=line["pattern"],
        flops={dtype: float(line[dtype]) * 1e12 for dtype in DTYPES if line[dtype]},
        memory=float(line["memory_gb"]) * 2**30,  # makers count memory in GiB
        memory_rate=float(line["memory_gb_s"]) * 1e9,
        link_rate=float(line["link_gb_s"]) * 1e9,
        nic_rate=float(line["nic_gb_s"]) * 1e9,
        devices_per_host=int(line["per_host"]),
        num_compute_units=int(line["units"]),
        source=line["source"],
    )
