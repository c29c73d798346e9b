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

PEER_WORDS = re.compile(  # what gloo says in a plain RuntimeError when a peer is gone
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|timed out|timeout", re.IGNORECASE
)

Made = TypeVar("Made")


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: `where` (a key, an axis, a file), `what` was given and is needed, and the `fix`."""

    what: str
    fix: str
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}\n  repair: {self.fix}"


class PlanError(Exception):
    """A request that cannot work, said before any process starts. Carries every fault found, not the first."""

    def __init__(self, what: str, *, fix: str, where: str = "", others: Iterable[Fault] = ()) -> None:
        self.faults = (Fault(what, fix, where), *others)
        super().__init__("\n".join(map(str, self.faults)))

    @classmethod
    def of(cls, faults: Iterable[Fault]) -> "PlanError":
        """The error that reports all of `faults` (at least one)."""
        first, *others = faults
        return cls(first.what, fix=first.fix, where=first.where, others=others)


class CollectiveError(RuntimeError):
    """A collective that did not complete: which rank called what, for which action, and where to look.

    `report` says who is to blame, in words that are the same on every rank ("": nobody could find out). Of the ranks that
    have the same report one `speaks`; the others need not repeat it on a terminal that they share.
    """

    def __init__(self, text: str, *, report: str = "", speaks: bool = True) -> None:
        super().__init__(text)
        self.report, self.speaks = report, speaks


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one `PlanError` holding all `faults`; return silently when there are none."""
    found = tuple(faults)
    if found:
        raise PlanError.of(found)


def gathered(faults: list[Fault], make: Callable[..., Made], *args: object) -> Made | None:
    """What `make` makes of `args`; None where it refuses them with a `PlanError`, whose faults are added to `faults`."""
    try:
        return make(*args)
    except PlanError as error:
        faults += error.faults
    return None


def nearest(given: str, known: Iterable[str]) -> str:
    """A phrase for a repair: the known word most like `given`, or the list of known words."""
    known = sorted(known)
    match = get_close_matches(given, known, n=1, cutoff=0.5)
    return f"did you mean '{match[0]}'?" if match else f"choose one of: {', '.join(known)}"


def size(nbytes: float) -> str:
    """Bytes in the unit that fits, three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
