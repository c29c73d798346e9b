"""Files of measurements, device.toml and cluster.toml: all diagnostics of a file are reported at once;
writing is atomic.

device.toml is written by `meshwright bench device` for people, and read by the planner:

    format, version                                                 of the file: plan/job/file_format.py
    date, kind, device, torch, threads, ranks, memory               what was measured, when and how
    call_s, call_backward_s                                         the least seconds of an operation
    host_link_rate, host_memory_rate, host_memory                   copies, AdamW, bytes/s; the host's bytes
    disk_rate                                                       bytes/s, where somebody wrote it
    matmuls, attention, memory_ops, elementwise_ops, codings, straggler_samples      the measurements:
                                                                    planner/machine/device_profile.py
"""

import json
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    raise_diagnostics,
    refuse_special_files,
    refuse_write_errors,
)
from meshwright.plan.job.file_format import DEVICE_PROFILE, FileFormat
from meshwright.planner.machine.device_profile import DeviceProfile
from meshwright.run.config.toml_validation import SchemaCheck
from meshwright.run.telemetry.atomic_write import replace_file


class Measurements(Protocol):
    """The contents of such a file."""

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yields everything that is wrong with it."""
        ...


MeasurementsT = TypeVar("MeasurementsT", bound=Measurements)


def read_toml(path: Path, fix: str) -> dict[str, Any]:
    """Returns the TOML document at `path`. Raises PlanError when there is none, with `fix` as the repair."""
    refuse_special_files([path], fix)
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
    file_format: FileFormat,
    path: Path,
    extra_diagnostics: Callable[[MeasurementsT], Iterable[Diagnostic]] = lambda said: (),
) -> MeasurementsT:
    """Returns the measurements of type `kind` in `document`, a file of `file_format` read from `path`.

    Raises PlanError for another format or version, or with their diagnostics and those of
    `extra_diagnostics`.
    """
    diagnostics: list[Diagnostic] = []
    contents = file_format.contents(document, str(path))
    measurements = SchemaCheck(str(path), diagnostics=diagnostics).convert(contents, kind, ())
    if measurements is not None and not diagnostics:
        diagnostics += [
            replace(diagnostic, location=f"{path}: {diagnostic.location}")
            for diagnostic in (*measurements.diagnostics(), *extra_diagnostics(measurements))
        ]
    raise_diagnostics(diagnostics)
    return measurements


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Writes a file of these lines. Raises PlanError when it cannot be written."""
    with refuse_write_errors("the file", path, "name a file in a folder that can be written to: --out"):
        replace_file(path, "\n".join([*lines, ""]))


PROFILE_HEADER = """\
# What a device does per second, measured by `meshwright bench device`. Plans are estimated with it:
# --hardware device.toml. Measure again when the device, torch or the number of threads change.
"""
TABLE_COMMENTS = {
    "matmuls": (
        "matrix products, [m, k] by [k, n] so many at once: FLOP/s, and the distance of "
        "the quartiles as a share"
    ),
    "attention": "fused attention without a mask: seconds, backward alone",
    "memory_ops": "operations that only read and write: bytes of both together, bytes/s",
    "elementwise_ops": "operations that compute much for each number: seconds of one",
    "codings": "codecs: seconds of one element, coded, summed and decoded; or encoded, or decoded, once",
    "straggler_samples": "work of so many seconds: how far the later of two is behind their mean, as a share",
}


def read_profile(path: Path) -> DeviceProfile:
    """Returns the profile in the file at `path`. Raises PlanError with every diagnostic."""
    return parse_measurements(
        read_toml(path, "measure the device first: meshwright bench device --out device.toml"),
        DeviceProfile,
        DEVICE_PROFILE,
        path,
    )


def write_profile(profile: DeviceProfile, path: Path) -> DeviceProfile:
    """Writes `profile` to `path` with four significant digits, and returns what a reader gets.

    Raises PlanError when the file cannot be written.
    """
    write_lines(path, [PROFILE_HEADER, *_lines(profile)])
    return read_profile(path)


def _lines(profile: DeviceProfile) -> Iterator[str]:
    for key, value in (DEVICE_PROFILE.header | vars(profile)).items():
        if key not in TABLE_COMMENTS and not key.startswith("_") and value != 0:
            yield f"{key} = {_toml_value(value)}"
    for key, comment in TABLE_COMMENTS.items():
        yield f"\n# {comment}\n{key} = ["
        yield from _tables(vars(profile)[key])
        yield "]"


def _tables(rows: Iterable[object]) -> Iterator[str]:
    for row in rows:
        yield f"    {{{', '.join(f'{key} = {_toml_value(value)}' for key, value in vars(row).items())}}},"


def _toml_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
