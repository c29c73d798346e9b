"""The machine that a plan is for: devices of one kind, so many on each host, and the links between them.

    device    the maker's figures (plan/hardware/devices.csv): peaks, memory, links
    rates     the share of them that is reached (machine_rates.py): fitted, or measured by `bench device`,
              `bench network`
    codings   seconds of one gradient element, coded and decoded, by codec: of `bench device`, or unknown
    hosts     ranks are placed on hosts in order, the innermost axis first: tp, then cp, dp, pp

An unknown device is described by a table in a file (run/config), or here: Machine(DeviceSpec(...), count,
MachineRates()).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.plan.hardware.device_specs import DeviceSpec, find_device, known_devices
from meshwright.plan.job.errors import PlanError, suggest_name
from meshwright.planner.machine.machine_rates import MachineRates, load_rates

# hosts at most on a link of a fabric's upper levels, however many there are: those of arXiv 2407.21783, 3.3.1
MAX_FABRIC_CONTENTION = 7.0
MAX_ASSUMED_HOST = 8  # devices that one host has slots for, of a kind whose maker does not say how many


@dataclass(frozen=True)
class Machine:
    """`num_devices` devices of one kind, with the rates that they reach."""

    device: DeviceSpec
    num_devices: int
    rates: MachineRates
    host_size_override: int = 0
    codings: Mapping[str, float] = field(default_factory=dict)

    @property
    def devices_per_host(self) -> int:
        """Devices on one host."""
        return self.host_size_override or self.device.devices_per_host

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to the others of its host."""
        return self.device.link_rate * self.rates.link

    def nic_rate(self, num_hosts: float) -> float:
        """Returns the bytes per second that a device sends out of its host while `num_hosts` hosts send."""
        return self.device.nic_rate * self.rates.nic / self.fabric_contention(num_hosts)

    def fabric_contention(self, num_hosts: float) -> float:
        """Returns the slowdown of a message to another host while `num_hosts` hosts send."""
        return min(
            MAX_FABRIC_CONTENTION,
            1 + (num_hosts / self.rates.fabric_half_hosts) ** self.rates.fabric_exponent,
        )

    def peak_flops(self, dtype: str) -> float:
        """Returns the FLOP/s of matmuls in `dtype`.

        A device with only one half dtype has its figure for both. Raises PlanError if it has none.
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
    """Returns `num_devices` devices of the kind called `device_name`.

    Raises PlanError when it is not known, with the most similar names.
    """
    device = find_device(device_name)
    if device is None:
        known = [each.name for each in known_devices()]
        text = f"'{device_name}' is not a known device"
        fix = (
            f"{suggest_name(device_name.upper(), known)} Or describe it in a file: "
            f"docs/howto/choose_a_plan.md"
        )
        raise PlanError(text, fix=fix, location="--hardware")
    return Machine(device, num_devices, load_rates(device.name), host_size_override)


def on_assumed_host(machine: Machine) -> tuple[Machine, tuple[str, ...]]:
    """Returns `machine` with all devices on one host if their kind has links but no number per host, and a
    note that says so; else the machine as it is.
    """
    device, count = machine.device, machine.num_devices
    if machine.devices_per_host or not device.link_rate or not 1 < count <= MAX_ASSUMED_HOST:
        return machine, ()
    note = f"the {count} devices are assumed to share one host, with {device.link_rate / 1e9:.3g} GB/s each: "
    note += f"{device.name} has no number per host (per_host in a [device] table)"
    return replace(machine, host_size_override=count), (note,)


def with_nic(machine: Machine, bytes_per_s: float) -> Machine:
    """Returns `machine` with another network between hosts: bytes per second and device."""
    return replace(machine, device=replace(machine.device, nic_rate=bytes_per_s))
