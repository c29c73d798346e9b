"""device.toml: what `meshwright bench device` found out about a device, written for people and read by the planner.

    version, date, kind, device, torch, threads, ranks, memory      what was measured, when and how
    call_s, call_backward_s                                         seconds that an operation takes at least
    products, attention, moved, computed, stretches                 core/profile.py says what their figures are

Every fault of a file is reported at once.

Files of figures that were measured, device.toml and cluster.toml: read with every fault at once, written whole or not.
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.plan.hardware.device_profile import DeviceProfile
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.run.config.schema import SchemaCheck
from meshwright.run.telemetry.trace import replace_file


class Measurements(Protocol):
    """What such a file says."""

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Everything that is wrong with it."""
        ...


MeasurementsT = TypeVar("MeasurementsT", bound=Measurements)


def read_toml(path: Path, fix: str) -> dict[str, Any]:
    """The TOML document at `path`. Raises PlanError when there is none, with `fix` as the repair."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise PlanError("there is no such file", fix=fix, location=str(path)) from error
    except OSError as error:
        text = f"the file cannot be read: {error.strerror}"
        raise PlanError(text, fix="name a file that can be read", location=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"not TOML: {error}", fix=fix, location=str(path)) from error


def parse_measurements(
    document: dict[str, Any],
    kind: type[MeasurementsT],
    path: Path,
    extra_diagnostics: Callable[[MeasurementsT], Iterable[Diagnostic]] = lambda said: (),
) -> MeasurementsT:
    """The figures of this `kind` in `document`, read from `path`. Raises PlanError with its faults, and those of `also`."""
    faults: list[Diagnostic] = []
    found = SchemaCheck(str(path), diagnostics=faults).convert(document, kind, ())
    if found is not None and not faults:
        faults += [
            replace(fault, location=f"{path}: {fault.location}")
            for fault in (*found.diagnostics(), *extra_diagnostics(found))
        ]
    raise_diagnostics(faults)
    return found


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of these lines. Raises PlanError when it cannot be written."""
    try:
        replace_file(path, "\n".join([*lines, ""]))
    except OSError as error:
        fix = "name a file in a folder that can be written to: --out"
        raise PlanError(
            f"the file cannot be written: {error.strerror}", fix=fix, location=str(path)
        ) from error


PROFILE_HEADER = """\
# What a device does per second, measured by `meshwright bench device`. Plans are priced by it: --hardware device.toml. Measure
# again when the device, torch or the number of threads change.
"""
TABLE_COMMENTS = {
    "matmuls": "matrix products, [m, k] by [k, n] so many at once: FLOP/s, and the distance of the quartiles as a share",
    "attention": "fused attention without a mask: seconds, backward alone",
    "memory_ops": "operations that only read and write: bytes of both together, bytes/s",
    "elementwise_ops": "operations that compute much for each number: seconds of one",
    "lag_samples": "work of so many seconds: how far the later of two is behind their mean, as a share",
}


def read_profile(path: Path) -> DeviceProfile:
    """The profile in the file at `path`. Raises PlanError with every fault of it."""
    return parse_measurements(
        read_toml(path, "measure the device first: meshwright bench device --out device.toml"),
        DeviceProfile,
        path,
    )


def write_profile(profile: DeviceProfile, path: Path) -> DeviceProfile:
    """Write `profile` to `path`; returns it as a reader gets it, with figures of four digits.

    Raises PlanError when the file cannot be written.
    """
    write_lines(path, [PROFILE_HEADER, *_lines(profile)])
    return read_profile(path)


def _lines(profile: DeviceProfile) -> Iterator[str]:
    for key, value in vars(profile).items():
        if key not in TABLE_COMMENTS and not key.startswith("_"):
            yield f"{key} = {_said(value)}"
    for key, words in TABLE_COMMENTS.items():
        yield f"\n# {words}\n{key} = ["
        yield from _tables(vars(profile)[key])
        yield "]"


def _tables(rows: Iterable[object]) -> Iterator[str]:
    for row in rows:
        yield f"    {{{', '.join(f'{key} = {_said(value)}' for key, value in vars(row).items())}}},"


def _said(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
