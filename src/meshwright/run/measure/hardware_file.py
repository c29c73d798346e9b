"""Resolves `--hardware`: a known kind of device, a file that describes one, or a file of `bench device`.

    h100                     a known kind of device (plan/hardware/devices.csv)
    device.toml              measured by `bench device`; links come from a cluster.toml, or the vendor's data
    my.toml                  a [device] table: five lines

        [device]
        like = "h100"                    a known kind; the keys below it override its values
        measured = "device.toml"         measured by `bench device` on one of them
        name = "X9"                      your name of it
        tflops = {bfloat16 = 500}        1e12 FLOP/s of matrix products, by dtype
        memory_gb = 64                   GiB of a device
        memory_gb_s = 2000               1e9 bytes per second of its memory
        link_gb_s = 200                  1e9 bytes per second to the devices of its host, one way
        nic_gb_s = 25                    1e9 bytes per second out of its host, one way
        per_host = 8                     devices on a host
        units = 100                      multiprocessors, compute units, or cores
        watts = 600                      the most power that a device takes
        host_link_gb_s = 63              1e9 bytes per second between it and its host's memory, one way
        disk_gb_s = 3                    1e9 bytes per second of its host's disks, for each device
        host_memory_gb_s = 40            1e9 bytes per second of its host's memory, for each device
        host_gb = 2048                   GiB of its host's memory, which all devices of the host share
        disk_gb = 4000                   GiB that are free on its host's disk, likewise

        [rates]                          the fractions of these peaks that it reaches, where you know them

Without `like` and `measured` all keys up to per_host are needed; `units` has a usual default, without `watts`
no energy is shown, and a plan that copies to the host or to disks needs the rates of what it uses. All
diagnostics of a file are reported at once.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

from meshwright.plan.hardware.device_specs import DTYPES, DeviceSpec, find_device, known_devices
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name
from meshwright.plan.job.file_format import DEVICE_PROFILE
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.planner.machine.from_benchmark import measured_codings, measured_device, measured_rates
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.machine.machine_rates import RATE_NAMES, load_rates
from meshwright.run.config.toml_validation import SchemaCheck
from meshwright.run.measure.profile_files import parse_measurements, read_profile, read_toml

DEFAULT_NUM_UNITS = 100
LINKS_FIX = (
    "measure links: meshwright bench network, then --cluster cluster.toml; or set it in a [device] table "
    "with `like` or `measured`"
)
DEVICE_FIX = (
    "write a [device] table (docs/howto/choose_a_plan.md), or measure: meshwright bench device "
    "--out device.toml"
)
FRACTION_RATES = (
    "matmul",
    "matmul_float8",
    "matmul_float8_blocks",
    "matmul_float4",
    "attention",
    "memory",
    "link",
    "nic",
)
FRACTION_RATES += ("wave_tail", "tp_overlap", "grad_reduce_overlap")  # fractions, at most 1
MAX_FACTOR = 1000.0  # upper limit of a rate that is no fraction
RATE_RANGES = {  # rates with limits of their own
    "attention_backward": (0.01, 5.0, "a share of what attention reaches"),
    "attention_flash1": (0.01, 5.0, "a share of what attention reaches"),
    "attention_flash3": (0.01, 5.0, "times what attention reaches"),
    "half_rate_dim": (1.0, 1e5, "the size of an inner dim"),
    "fabric_half_hosts": (1.0, 1e6, "a number of hosts"),
    "fabric_exponent": (0.1, 20.0, "an exponent"),
    **dict.fromkeys(
        ("kernel_start_s", "kernel_launch_s", "latency_s"), (0.0, 1.0, "seconds: 3e-5 are 30 us")
    ),
    **dict.fromkeys(("microbatch_overhead_s", "step_overhead_s"), (0.0, 3600.0, "seconds")),
}
MAX_VALUES = {  # larger values are in another unit
    "memory_gb": (1e4, "GiB: 80 for an H100"),
    "memory_gb_s": (1e6, "1e9 bytes per second: 3350 for an H100"),
    "link_gb_s": (1e5, "1e9 bytes per second: 450 for an H100"),
    "nic_gb_s": (1e4, "1e9 bytes per second: 50 for an H100"),
    "per_host": (1e6, "the devices of one host: 8"),
    "units": (1e7, "multiprocessors, compute units or cores: 132 for an H100"),
    "watts": (1e5, "watts: 700 for an H100"),
    "host_link_gb_s": (1e4, "1e9 bytes per second: 63 for an H100"),
    "disk_gb_s": (1e4, "1e9 bytes per second: 3 for a fast disk"),
    "host_memory_gb_s": (1e5, "1e9 bytes per second: 40 for each of 8 devices"),
    "host_gb": (1e6, "GiB: 2048 for a host with 2 TiB, whatever the number of its devices"),
    "disk_gb": (1e7, "GiB: 4000 for a host with 4 TB free, whatever the number of its devices"),
}
DEVICE_FIELDS = {
    "memory_gb": "memory",
    "memory_gb_s": "memory_rate",
    "link_gb_s": "link_rate",
    "nic_gb_s": "nic_rate",
    "host_link_gb_s": "host_link_rate",
    "disk_gb_s": "disk_rate",
    "host_memory_gb_s": "host_memory_rate",
    "host_gb": "host_memory",
    "disk_gb": "disk_space",
}
UNIT_SCALES = {
    **dict.fromkeys(DEVICE_FIELDS, 1e9),
    **dict.fromkeys(("memory_gb", "host_gb", "disk_gb"), 2**30),
}


@dataclass(frozen=True)
class DeviceTable:
    """The table [device] as written; 0 or empty means not given."""

    like: str = ""
    measured: str = ""
    name: str = ""
    tflops: dict[str, float] = field(default_factory=dict)
    memory_gb: float = 0.0
    memory_gb_s: float = 0.0
    link_gb_s: float = 0.0
    nic_gb_s: float = 0.0
    per_host: int = 0
    units: int = 0
    watts: float = 0.0
    host_link_gb_s: float = 0.0
    disk_gb_s: float = 0.0
    host_memory_gb_s: float = 0.0
    host_gb: float = 0.0
    disk_gb: float = 0.0


@dataclass(frozen=True)
class _File:
    device: DeviceTable
    rates: dict[str, float] = field(default_factory=dict)


def is_hardware_file(hardware: str) -> bool:
    """Returns whether `hardware` is a file, not the name of a kind."""
    return hardware.endswith(".toml") or Path(hardware).is_file()


def read_machine(hardware: str, count: int) -> Machine:
    """Returns `count` devices of what `hardware` names. Raises PlanError with every diagnostic.

    Values that a file does not give (links, devices per host) are 0: unknown.
    """
    if not is_hardware_file(hardware):
        return make_machine(hardware, count)
    path = Path(hardware)
    document = read_toml(path, DEVICE_FIX)
    if isinstance(document.get("device"), str):
        profile = parse_measurements(document, DeviceProfile, DEVICE_PROFILE, path)
        device = measured_device(profile)
        return Machine(device, count, measured_rates(profile, device), codings=measured_codings(profile))
    if "device" not in document:
        raise PlanError(
            "this file has no [device] table, nor did `bench device` write it",
            fix=DEVICE_FIX,
            location=hardware,
        )
    diagnostics: list[Diagnostic] = []
    file = SchemaCheck(str(path), tables={"device": DeviceTable}, diagnostics=diagnostics).convert(
        document, _File, ()
    )
    if file is None:  # what fits may have errors of its own, which are reported with these
        document = _keep_valid_keys(document)
        file = SchemaCheck(str(path)).convert(document, _File, ())
    return _build_machine(file, document["device"], path, count, diagnostics)


def with_host_links(machine: Machine, hardware: str) -> Machine:
    """Returns `machine` with hosts for its devices. Raises PlanError if they communicate over links that are
    unknown.
    """
    if machine.num_devices == 1:
        return replace(machine, host_size_override=machine.devices_per_host or 1)
    device, host = machine.device, machine.devices_per_host
    diagnostics = []
    for key, known in (("link_gb_s", device.link_rate), ("per_host", host)):
        if not known:
            diagnostics.append(
                Diagnostic(f"{machine.num_devices} devices, and {key} is not known", LINKS_FIX, hardware)
            )
    if host and machine.num_devices > host and not device.nic_rate:
        diagnostics.append(
            Diagnostic(
                f"{machine.num_devices} devices on hosts of {host}, and nic_gb_s is not known",
                LINKS_FIX,
                hardware,
            )
        )
    raise_diagnostics(diagnostics)
    return replace(
        machine,
        device=replace(device, devices_per_host=device.devices_per_host or host),
        host_size_override=host,
    )


def find_profile(hardware: str) -> DeviceProfile | None:
    """Returns the profile of `bench device` if `hardware` names its file, or a file that names it; None for
    a kind.

    Raises PlanError for a file that cannot be read.
    """
    if not is_hardware_file(hardware):
        return None
    path = Path(hardware)
    document = read_toml(path, DEVICE_FIX)
    if isinstance(document.get("device"), str):
        return parse_measurements(document, DeviceProfile, DEVICE_PROFILE, path)
    table = document.get("device")
    file = table.get("measured") if isinstance(table, dict) else None
    return read_profile(path.parent / file) if isinstance(file, str) and file else None


def _keep_valid_keys(document: dict[str, Any]) -> dict[str, Any]:
    tables = {name: table for name in ("device", "rates") if isinstance(table := document.get(name), dict)}
    kept: dict[str, Any] = {"device": {}, "rates": {}}
    for name, table in tables.items():
        for key, value in table.items():
            if SchemaCheck("").convert({"device": {}, name: {key: value}}, _File, ()) is not None:
                kept[name][key] = value
    return kept


def _build_machine(
    file: _File, keys: Iterable[str], path: Path, count: int, before: Iterable[Diagnostic]
) -> Machine:
    """Builds the machine of a [device] table with these `keys`. Values with an earlier diagnostic get no
    second one.
    """
    table, diagnostics = file.device, list(before)
    places = [diagnostic.location for diagnostic in diagnostics]
    for diagnostic in _file_diagnostics(file, keys):
        where = f"{path}: {diagnostic.location}"
        if not any(
            f"{where}.".startswith(f"{each}.") or f"{each}.".startswith(f"{where}.") for each in places
        ):
            diagnostics.append(replace(diagnostic, location=where))
    profile, base = None, None
    if table.measured:
        try:
            profile = read_profile(path.parent / table.measured)
        except PlanError as error:
            diagnostics += error.diagnostics
    if table.like:
        base = find_device(table.like)
        if base is None:
            text = f"'{table.like}' is not a known device"
            diagnostics.append(
                Diagnostic(
                    text,
                    suggest_name(table.like.upper(), [each.name for each in known_devices()]),
                    f"{path}: device.like",
                )
            )
    if base is not None and profile is not None and find_device(profile.device) is not base:
        text = f"like = '{table.like}', and {table.measured} was measured on {profile.device}"
        diagnostics.append(Diagnostic(text, "leave one of the two out", f"{path}: device.measured"))
    raise_diagnostics(diagnostics)
    if base is None:
        base = measured_device(profile) if profile is not None else _empty_device_spec()
    device = _device(table, base, path)
    rates = load_rates(base.name) if profile is None else measured_rates(profile, device)
    codings = {} if profile is None else measured_codings(profile)
    return Machine(device, count, replace(rates, **file.rates), codings=codings)


def _device(table: DeviceTable, base: DeviceSpec, path: Path) -> DeviceSpec:
    figures = {
        name: vars(table)[key] * UNIT_SCALES[key] for key, name in DEVICE_FIELDS.items() if vars(table)[key]
    }
    flops = {**base.flops, **{dtype: 1e12 * value for dtype, value in table.tflops.items()}}
    if "float32" in flops and not {"bfloat16", "float16"} & set(flops):
        flops["bfloat16"] = flops["float32"]  # without units for 16 bits they are computed as 32
    name = table.name or (f"{base.name} of {path.name}" if table.like else base.name or path.stem)
    pattern = base.pattern or re.escape(
        name
    )  # a name of one's own changes nothing of what a driver calls the device
    given = replace(base, name=name, pattern=pattern, flops=flops, source=str(path), **figures)
    return replace(
        given,
        devices_per_host=table.per_host or given.devices_per_host,
        num_compute_units=table.units or given.num_compute_units,
        watts=table.watts or given.watts,
    )


def _empty_device_spec() -> DeviceSpec:
    return DeviceSpec("", "", {}, 0.0, 0.0, 0.0, 0.0, 0, DEFAULT_NUM_UNITS, "")


def _file_diagnostics(file: _File, keys: Iterable[str]) -> Iterator[Diagnostic]:
    table = file.device
    if not table.like and not table.measured:
        optional = (
            *("like", "measured", "units", "watts"),
            *("host_link_gb_s", "disk_gb_s", "host_memory_gb_s", "host_gb", "disk_gb"),
        )
        lacking = [each.name for each in fields(DeviceTable) if each.name not in optional]
        for key in lacking:
            if not vars(table)[key] and (key not in keys or key in ("name", "tflops")):
                yield Diagnostic(
                    "this key is missing",
                    'write it, or a kind that is most like yours: like = "h100"',
                    f"device.{key}",
                )
    for key, (most, unit) in MAX_VALUES.items():
        value = vars(table)[key]
        if key in keys and not 0 < value < inf:  # a written 0 does not mean "unknown"
            fix = "write a number above 0" + (
                ", or leave the key out" if table.like or table.measured else ""
            )
            yield Diagnostic(f"{key} = {value}", fix, f"device.{key}")
        elif value > most:
            yield Diagnostic(f"{key} = {value:g}, more than {most:g}", f"write {unit}", f"device.{key}")
    yield from _peak_diagnostics(table)
    for name, value in file.rates.items():
        least, most, unit = RATE_RANGES.get(
            name, (0.0, 1.0 if name in FRACTION_RATES else MAX_FACTOR, "a number of times")
        )
        if name not in RATE_NAMES:
            yield Diagnostic(f"there is no rate '{name}'", suggest_name(name, RATE_NAMES), f"rates.{name}")
        elif not 0 < value < inf:
            yield Diagnostic(f"{name} = {value}", "write a number above 0", f"rates.{name}")
        elif value > most and name in FRACTION_RATES:
            yield Diagnostic(f"{name} = {value}, more than all", "write a share, 1 at most", f"rates.{name}")
        elif not least <= value <= most:
            yield Diagnostic(
                f"{name} = {value:g}; needed is {unit}", f"write {least:g} to {most:g}", f"rates.{name}"
            )


def _peak_diagnostics(table: DeviceTable) -> Iterator[Diagnostic]:
    for dtype, value in table.tflops.items():
        if dtype not in DTYPES:
            bits = re.sub(
                r"^(float|bfloat|fp|bf|tf)(?=\d)", "", dtype
            )  # float64 is no float4 misspelt, nor int8 float8
            alike = [each for each in DTYPES if bits.isdecimal() and each.endswith(bits)]
            fix = (
                suggest_name(dtype, alike)
                if alike
                else f"leave it out, or choose one of: {', '.join(DTYPES)}"
            )
            yield Diagnostic(f"there is no dtype '{dtype}' in plans", fix, f"device.tflops.{dtype}")
        elif not 0 < value < inf:
            yield Diagnostic(f"{value} TFLOP/s", "write a number above 0", f"device.tflops.{dtype}")
        elif value > 1e6:
            yield Diagnostic(
                f"{value:g} TFLOP/s, more than 1e6",
                "write TFLOP/s: 989 for an H100",
                f"device.tflops.{dtype}",
            )
    if (
        table.tflops
        and not table.like
        and not table.measured
        and not {"bfloat16", "float16", "float32"} & set(table.tflops)
    ):
        text = f"tflops of {', '.join(table.tflops)} alone, and plans are chosen in 16 bits"
        yield Diagnostic(text, "add those of bfloat16: tflops = {bfloat16 = 500}", "device.tflops")
