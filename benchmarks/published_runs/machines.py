"""The machine of a published run, from the hardware column of its row: device, memory, devices per host,
network.

    H100-64GB SXM (MareNostrum 5, 4 per node, NDR InfiniBand)     64 GB, 4 per host, 50 GB/s for each
    A100-80GB SXM (Jean Zay, 4xOmni-Path 100Gb per 8-GPU node)    80 GB, 8 per host, 4 x 12.5 GB/s for all
    A100-80GB SXM (2Tb/s RoCE per node)                           250 GB/s for the 8 that a host of A100 has
    A100-80GB SXM (400Gb/s)                                       more than its network card carries, and not
                                                                  clear for how many devices: ignored

What a row does not state is the device's default (plan/hardware/devices.csv). A generation of cards without a
number is one card per device.
"""

import re
from dataclasses import replace

from meshwright.plan.hardware.device_specs import find_device
from meshwright.planner.machine.machine import Machine, with_nic
from meshwright.planner.machine.machine_rates import load_rates

BITS = {"Gb": 1e9 / 8, "Tb": 1e12 / 8, "GB": 1e9}  # bytes in each
CARDS = {
    "NDR": 50e9,
    "HDR": 25e9,
    "EDR": 12.5e9,
    "Omni-Path": 12.5e9,
}  # bytes per second, if the row has no number
MEMORY = re.compile(r"[- ](\d+) ?GB\b")
HOST = re.compile(r"(\d+)(?:[- ]GPUs?)?(?: used)?(?: per |/| in each of \d+ )node|(\d+)-GPU (?:node|host)")
INSIDE = re.compile(r"(?:NVLink|HBM)[^,()]*")
SEVERAL_CARDS = re.compile(r"(\d+)x ?(?:[A-Za-z-]+ )?([\d.]+) ?(Gb|GB)")
CARDS_BY_CODE = re.compile(r"(\d+)x ?(?:NDR|HDR|EDR)(\d+)")
ONE_RATE = re.compile(r"([\d.]+) ?(Gb|Tb)(?:/s|ps)?([^,()]*)")


def machine_of(hardware: str) -> Machine | None:
    """Returns one device of the hardware column, with its host and network; None if the device is not known,
    or there are several kinds.
    """
    if "+" in hardware.partition("(")[0]:
        return None
    device = find_device(hardware)
    if device is None:
        return None
    memory = MEMORY.search(hardware.partition("(")[0])
    if memory and float(memory[1]) * 2**30 != device.memory:
        device = replace(device, memory=float(memory[1]) * 2**30)
    hosts = HOST.search(hardware)
    found = Machine(device, 1, load_rates(device.name), int(hosts[1] or hosts[2]) if hosts else 0)
    rate = _network(INSIDE.sub("", hardware.partition("(")[2]), found)
    return found if rate is None else with_nic(found, rate)


def _network(network: str, machine: Machine) -> float | None:
    """Returns the bytes per second and device out of a host, from the text `network`; None
    if it states none.
    """
    several, by_code, one = (
        SEVERAL_CARDS.search(network),
        CARDS_BY_CODE.search(network),
        ONE_RATE.search(network),
    )
    if several:
        return int(several[1]) * float(several[2]) * BITS[several[3]] / machine.devices_per_host
    if by_code:
        return int(by_code[1]) * float(by_code[2]) * BITS["Gb"] / machine.devices_per_host
    if one:
        rate = float(one[1]) * BITS[one[2]]
        if "node" in one[3]:
            return rate / machine.devices_per_host
        return rate if "GPU" in one[3] or rate <= machine.device.nic_rate else None
    return next((rate for name, rate in CARDS.items() if name in network), None)
