"""The machine that a plan is for: so many devices of a kind, so many on each host, and the links between them.

    kind      facts of its maker (core/devices.csv): peaks, memory, links
    rates     what share of them is reached (planner/rates.py): fitted, or measured by `bench device` and `bench network`
    hosts     ranks are laid on hosts in order, the innermost axis first: tp, then cp, dp, pp

A device that is not known takes a table in a file (run/hardware.py), or here: Machine(Device(...), count, Rates()).
"""

from dataclasses import dataclass, replace

from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.job.errors import PlanError, suggest_name
from meshwright.planner.machine.efficiency import MachineRates, load_rates

MAX_FABRIC_CONTENTION = 7.0  # hosts at most on a link of a fabric's upper levels, however many there are: those of arXiv 2407.21783, 3.3.1


@dataclass(frozen=True)
class Machine:
    """`count` devices of one kind, `per_host` on each host, with the rates that they reach."""

    device: DeviceSpec
    num_devices: int
    rates: MachineRates
    host_size_override: int = 0

    @property
    def devices_per_host(self) -> int:
        """Devices on one host."""
        return self.host_size_override or self.device.devices_per_host

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to the others of its host."""
        return self.device.link_rate * self.rates.link

    def nic_rate(self, num_hosts: float) -> float:
        """Bytes per second that a device sends out of its host, while so many hosts do."""
        return self.device.nic_rate * self.rates.nic / self.fabric_contention(num_hosts)

    def fabric_contention(self, num_hosts: float) -> float:
        """How many times as long a message to another host takes while so many hosts send."""
        return min(
            MAX_FABRIC_CONTENTION,
            1 + (num_hosts / self.rates.fabric_half_hosts) ** self.rates.fabric_exponent,
        )

    def peak_flops(self, dtype: str) -> float:
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


def make_machine(device_name: str, num_devices: int, host_size_override: int = 0) -> Machine:
    """`count` devices of the kind that is called `kind`.

    Raises PlanError when it is not known, with the names that are most like it.
    """
    device = find_device(device_name)
    if device is None:
        known = [each.name for each in known_devices()]
        text = f"'{device_name}' is no device that is known here"
        fix = f"{suggest_name(device_name.upper(), known)} Or say its figures in a file: docs/howto/choose_a_plan.md"
        raise PlanError(text, fix=fix, location="--hardware")
    return Machine(device, num_devices, load_rates(device.name), host_size_override)


def with_nic(machine: Machine, bytes_per_s: float) -> Machine:
    """`given`, whose hosts have another network: bytes per second and device."""
    return replace(machine, device=replace(machine.device, nic_rate=bytes_per_s))
