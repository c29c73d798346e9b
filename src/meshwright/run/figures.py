"""Files of figures that were measured, device.toml and cluster.toml: read with every fault at once, written whole or not."""

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meshwright.core.errors import Fault, PlanError, raise_faults
from meshwright.run.schema import Check
from meshwright.run.trace import replace_file


class Figures(Protocol):
    """What such a file says."""

    def faults(self) -> Iterator[Fault]:
        """Everything that is wrong with it."""
        ...


Said = TypeVar("Said", bound=Figures)


def parsed(path: Path, fix: str) -> dict[str, Any]:
    """The TOML document at `path`. Raises PlanError when there is none, with `fix` as the repair."""
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError as error:
        raise PlanError("there is no such file", fix=fix, where=str(path)) from error
    except OSError as error:
        text = f"the file cannot be read: {error.strerror}"
        raise PlanError(text, fix="name a file that can be read", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"not TOML: {error}", fix=fix, where=str(path)) from error


def fitted(
    document: dict[str, Any], kind: type[Said], path: Path, also: Callable[[Said], Iterable[Fault]] = lambda said: ()
) -> Said:
    """The figures of this `kind` in `document`, read from `path`. Raises PlanError with its faults, and those of `also`."""
    faults: list[Fault] = []
    found = Check(str(path), faults=faults).fit(document, kind, ())
    if found is not None and not faults:
        faults += [replace(fault, where=f"{path}: {fault.where}") for fault in (*found.faults(), *also(found))]
    raise_faults(faults)
    return found


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file of these lines. Raises PlanError when it cannot be written."""
    try:
        replace_file(path, "\n".join([*lines, ""]))
    except OSError as error:
        fix = "name a file in a folder that can be written to: --out"
        raise PlanError(f"the file cannot be written: {error.strerror}", fix=fix, where=str(path)) from error
