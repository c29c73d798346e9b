"""Lists the known devices with the figures of their makers: `--hardware list`, and the page of the docs."""

from collections.abc import Callable, Iterator

from meshwright.plan.hardware.device_specs import DeviceSpec, known_devices
from meshwright.report.table import Column, Table

UNKNOWN = "-"
FIGURES: dict[str, Callable[[DeviceSpec], float | None]] = {
    "GiB": lambda device: device.memory / 2**30,
    "bf16 TFLOP/s": lambda device: _tera(device.peak("bfloat16") or device.peak("float16")),
    "fp8 TFLOP/s": lambda device: _tera(device.peak("float8")),
    "memory GB/s": lambda device: device.memory_rate / 1e9,
    "link GB/s": lambda device: device.link_rate / 1e9,
    "NIC GB/s": lambda device: device.nic_rate / 1e9,
    "per host": lambda device: device.devices_per_host,
}
NOTE = (
    "TFLOP/s without sparsity, of float16 where bfloat16 is missing; links and NIC per device, one way; "
    f"{UNKNOWN}: not known. Sources: docs/reference/hardware.md"
)


def device_rows() -> Iterator[tuple[str, ...]]:
    """Yields the name and the figures of each known device, as texts."""
    for device in sorted(known_devices(), key=lambda device: device.name):
        figures = (figure(device) for figure in FIGURES.values())
        yield device.name, *(f"{value:,.5g}" if value else UNKNOWN for value in figures)


def device_table() -> Table:
    """Returns the known devices as a table for the terminal."""
    return Table(["device", *(Column(name, "{}") for name in FIGURES)], list(device_rows()), note=NOTE)


def _tera(flops: float | None) -> float | None:
    return None if flops is None else flops / 1e12
