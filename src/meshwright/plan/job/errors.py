"""What is wrong with a request, and how to repair it.

A fault has three parts: what was given (with values), what is needed, and the repair. The repair is a required
argument, so no message can leave it out. Checks collect faults and raise them together: a user who made three
mistakes reads three messages, once, before any process starts.

Bytes as people read them.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

PEER_LOST_PATTERN = re.compile(  # what gloo says in a plain RuntimeError when a peer is gone
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|timed out|timeout",
    re.IGNORECASE,
)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Diagnostic:
    """One thing that is wrong: `where` (a key, an axis, a file), `what` was given and is needed, and the `fix`."""

    problem: str
    fix: str
    location: str = ""

    def __str__(self) -> str:
        place = f"{self.location}: " if self.location else ""
        return f"{place}{self.problem}\n  repair: {self.fix}"


class PlanError(Exception):
    """A request that cannot work, said before any process starts. Carries every fault found, not the first."""

    def __init__(
        self, problem: str, *, fix: str, location: str = "", more: Iterable[Diagnostic] = ()
    ) -> None:
        self.diagnostics = (Diagnostic(problem, fix, location), *more)
        super().__init__("\n".join(map(str, self.diagnostics)))

    @classmethod
    def from_diagnostics(cls, diagnostics: Iterable[Diagnostic]) -> "PlanError":
        """The error that reports all of `faults` (at least one)."""
        first, *others = diagnostics
        return cls(first.problem, fix=first.fix, location=first.location, more=others)


class CollectiveError(RuntimeError):
    """A collective that did not complete: which rank called what, for which action, and where to look.

    `report` says who is to blame, in words that are the same on every rank ("": nobody could find out). Of the ranks that
    have the same report one `speaks`; the others need not repeat it on a terminal that they share.
    """

    def __init__(self, text: str, *, report: str = "", is_reporter: bool = True) -> None:
        super().__init__(text)
        self.report, self.is_reporter = report, is_reporter


def raise_diagnostics(diagnostics: Iterable[Diagnostic]) -> None:
    """Raise one `PlanError` holding all `faults`; return silently when there are none."""
    found = tuple(diagnostics)
    if found:
        raise PlanError.from_diagnostics(found)


def collect_diagnostics(
    diagnostics: list[Diagnostic], function: Callable[..., Result], *args: object
) -> Result | None:
    """What `make` makes of `args`; None where it refuses them with a `PlanError`, whose faults are added to `faults`."""
    try:
        return function(*args)
    except PlanError as error:
        diagnostics += error.diagnostics
    return None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """A phrase for a repair: the known word most like `given`, or the list of known words."""
    known = sorted(known)
    match = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean '{match[0]}'?" if match else f"choose one of: {', '.join(known)}"


def format_nbytes(nbytes: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
