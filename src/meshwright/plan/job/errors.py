"""Reports what is wrong with a request, and how to repair it.

A diagnostic has three parts: what was given (with values), what is needed, and the repair. The repair is a
required argument, so no message can leave it out. Checks collect diagnostics and raise them together: a user
with three mistakes reads three messages, once, before any process starts. `format_nbytes` writes sizes for
all messages.
"""

import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

PEER_LOST_PATTERN = re.compile(  # gloo reports a lost peer as a plain RuntimeError with one of these texts
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|timed out|timeout",
    re.IGNORECASE,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Diagnostic:
    """One error: its `location` (a key, an axis, a file), the `problem` (what was given and is needed), and
    the `fix`.
    """

    problem: str
    fix: str
    location: str = ""

    def __str__(self) -> str:
        prefix = f"{self.location}: " if self.location else ""
        return f"{prefix}{self.problem}\n  repair: {self.fix}"


class PlanError(Exception):
    """A request that cannot work, raised before any process starts. Carries every diagnostic found, not only
    the first.
    """

    def __init__(
        self, problem: str, *, fix: str, location: str = "", more: Iterable[Diagnostic] = ()
    ) -> None:
        self.diagnostics = (Diagnostic(problem, fix, location), *more)
        super().__init__("\n".join(map(str, self.diagnostics)))

    @classmethod
    def from_diagnostics(cls, diagnostics: Iterable[Diagnostic]) -> "PlanError":
        """Returns the error that reports all `diagnostics` (at least one)."""
        first, *others = diagnostics
        return cls(first.problem, fix=first.fix, location=first.location, more=others)


class CollectiveError(RuntimeError):
    """A collective that did not complete: which rank called what, for which action, and where to look.

    `report` names the culprit in text that is equal on every rank ("": unknown). Of the ranks with the same
    report one `is_reporter`; the others need not repeat it on a shared terminal.
    """

    def __init__(self, text: str, *, report: str = "", is_reporter: bool = True) -> None:
        super().__init__(text)
        self.report, self.is_reporter = report, is_reporter


def raise_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    """Raises one `PlanError` with all `diagnostics`; returns if there are none."""
    found = tuple(diagnostics)
    if found:
        raise PlanError.from_diagnostics(found)


def diagnostics_in(table: str, diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Returns those of `diagnostics` whose location is in `table` of a config."""
    return [each for each in diagnostics if each.location.partition(".")[0] == table]


def collect_diagnostics(
    diagnostics: list[Diagnostic], function: Callable[..., Result], *args: object
) -> Result | None:
    """Returns the result of `function(*args)`; None if it raises a `PlanError`, whose diagnostics are added
    to `diagnostics`.
    """
    try:
        return function(*args)
    except PlanError as error:
        diagnostics += error.diagnostics
    return None


@contextmanager
def refuse_write_errors(what: str, path: Path, fix: str) -> Iterator[None]:
    """Raises a `PlanError` with `fix` if the body, which writes `what` to `path`, raises an OSError."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{what} cannot be written: {error.strerror}", fix=fix, location=str(path)) from error


def refuse_special_files(paths: Iterable[Path], fix: str) -> None:
    """Raises a `PlanError` with `fix` for those of `paths` that exist and are no regular files.

    Opening a pipe waits until another process opens its other end; folders, sockets and devices hold no file.
    """
    raise_diagnostics(
        Diagnostic(f"this is {kind}; needed is a regular file", fix, str(path))
        for path in paths
        if (kind := _special_kind(path))
    )


def _special_kind(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""  # whoever opens it says why it cannot be opened
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "")


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Returns the text of a repair: the known name most similar to `name`, or all known names."""
    known = sorted(known)
    match = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{match[0]}'?" if match else f"choose one of: {', '.join(known)}"


def suggest_choice(given: str, choices: Iterable[str]) -> str:
    """Returns the text of a repair: the most similar of `choices`, or all of them if that one differs only in
    its digits (float8 is no misspelt float64).
    """
    choices = tuple(choices)
    letters = re.sub(r"\d", "", given)
    others = [choice for choice in choices if re.sub(r"\d", "", choice) != letters]
    return suggest_name(given, choices) if len(others) == len(choices) else suggest_name("", choices)


def format_nbytes(nbytes: float) -> str:
    """Returns bytes in the unit that fits, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB" if nbytes < 999.5 else f"{nbytes:,.0f} TiB"
