"""The machine that a plan is for: so many devices of a kind, so many on each host, and the links between them.

    kind      facts of its maker (core/devices.csv): peaks, memory, links
    rates     what share of them is reached (planner/rates.py): fitted, or measured by `bench device` and `bench comm`
    hosts     ranks are laid on hosts in order, the innermost axis first: tp, then cp, dp, pp

A device that is not known takes a table in a file (run/hardware.py), or here: Machine(Device(...), count, Rates()).
"""

from dataclasses import dataclass, replace

from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.job.errors import PlanError, suggest_name
from meshwright.planner.machine.efficiency import Rates, rates_of

SHARED = 7.0  # hosts at most on a link of a fabric's upper levels, however many there are: those of arXiv 2407.21783, 3.3.1


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind, `per_host` on each host, with the rates that they reach."""

    device: DeviceSpec
    count: int
    rates: Rates
    per_host: int = 0

    @property
    def host(self) -> int:
        """Devices on one host."""
        return self.per_host or self.device.devices_per_host

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to the others of its host."""
        return self.device.link_rate * self.rates.link

    def nic_rate(self, hosts: float) -> float:
        """Bytes per second that a device sends out of its host, while so many hosts do."""
        return self.device.nic_rate * self.rates.nic / self.crowded(hosts)

    def crowded(self, hosts: float) -> float:
        """How many times as long a message to another host takes while so many hosts send."""
        return min(SHARED, 1 + (hosts / self.rates.crowd) ** self.rates.crowding)

    def peak(self, dtype: str) -> float:
        """FLOP/s of products in `dtype`. A device that has one half alone has it for both.

        Raises PlanError where it has none.
        """
        halves = ("bfloat16", "float16")
        found = [self.device.peak(each) for each in (dtype, *(halves if dtype in halves else ()))]
        for peak in found:
            if peak is not None:
                return peak
        known = ", ".join(self.device.flops)
        raise PlanError(
            f"{self.device.name} has no peak for {dtype}",
            fix=f"compute in one of {known}",
            location="hardware",
        )


def machine(kind: str, count: int, per_host: int = 0) -> Machine:
    """`count` devices of the kind that is called `kind`.

    Raises PlanError when it is not known, with the names that are most like it.
    """
    device = find_device(kind)
    if device is None:
        known = [each.name for each in known_devices()]
        text = f"'{kind}' is no device that is known here"
        fix = f"{suggest_name(kind.upper(), known)} Or say its figures in a file: docs/planning.md"
        raise PlanError(text, fix=fix, location="--hardware")
    return Machine(device, count, rates_of(device.name), per_host)


def with_nic(given: Machine, bytes_per_s: float) -> Machine:
    """`given`, whose hosts have another network: bytes per second and device."""
    return replace(given, device=replace(given.device, nic_rate=bytes_per_s))
