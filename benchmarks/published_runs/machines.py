"""The machine of a published run as its row calls it: which device, with what memory, how many on a host,
which network out.

    H100-64GB SXM (MareNostrum 5, 4 per node, NDR InfiniBand)     64 GB, 4 on a host, 50 GB/s out of it for
                                                                  each
    A100-80GB SXM (Jean Zay, 4xOmni-Path 100Gb per 8-GPU node)    80 GB, 8 on a host, 4 x 12.5 GB/s for all of
                                                                  them
    A100-80GB SXM (2Tb/s RoCE per node)                           250 GB/s for the 8 that an A100 has on a
                                                                  host
    A100-80GB SXM (400Gb/s)                                       more than its card carries, and nobody says
                                                                  whose: as unsaid

What a row does not say is the device's own (core/devices.csv). A generation of cards, without a number, is
one card per device.
"""

import re
from dataclasses import replace

from meshwright.plan.hardware.device_specs import find_device
from meshwright.planner.machine.efficiency import load_rates
from meshwright.planner.machine.machine import Machine, with_nic

BITS = {"Gb": 1e9 / 8, "Tb": 1e12 / 8, "GB": 1e9}  # bytes in each
CARDS = {
    "NDR": 50e9,
    "HDR": 25e9,
    "EDR": 12.5e9,
    "Omni-Path": 12.5e9,
}  # bytes per second, where no number stands beside
MEMORY = re.compile(r"[- ](\d+) ?GB\b")
HOST = re.compile(r"(\d+)(?:[- ]GPUs?)?(?: used)?(?: per |/| in each of \d+ )node|(\d+)-GPU (?:node|host)")
INSIDE = re.compile(r"(?:NVLink|HBM)[^,()]*")
MANY = re.compile(r"(\d+)x ?(?:[A-Za-z-]+ )?([\d.]+) ?(Gb|GB)")
CODED = re.compile(r"(\d+)x ?(?:NDR|HDR|EDR)(\d+)")
ONE = re.compile(r"([\d.]+) ?(Gb|Tb)(?:/s|ps)?([^,()]*)")


def machine_of(called: str) -> Machine | None:
    """One of the devices that a row calls so, on a host of its own network; None where they are not known."""
    device = find_device(called)
    if device is None:
        return None
    memory = MEMORY.search(called.partition("(")[0])
    if memory and float(memory[1]) * 2**30 != device.memory:
        device = replace(device, memory=float(memory[1]) * 2**30)
    hosts = HOST.search(called)
    found = Machine(device, 1, load_rates(device.name), int(hosts[1] or hosts[2]) if hosts else 0)
    rate = _network(INSIDE.sub("", called.partition("(")[2]), found)
    return found if rate is None else with_nic(found, rate)


def _network(said: str, machine: Machine) -> float | None:
    """Bytes per second and device out of a host, as `said`; None where nothing is."""
    many, coded, one = MANY.search(said), CODED.search(said), ONE.search(said)
    if many:
        return int(many[1]) * float(many[2]) * BITS[many[3]] / machine.devices_per_host
    if coded:
        return int(coded[1]) * float(coded[2]) * BITS["Gb"] / machine.devices_per_host
    if one:
        rate = float(one[1]) * BITS[one[2]]
        if "node" in one[3]:
            return rate / machine.devices_per_host
        return rate if "GPU" in one[3] or rate <= machine.device.nic_rate else None
    return next((rate for name, rate in CARDS.items() if name in said), None)
