"""Which algorithm for which message: a rule by size, written in one line.

    doubling <= 64 KiB, tree <= 1 MiB, else ring         messages of up to 64 KiB by doubling, and so on
    ring                                                 all messages by one algorithm

A strategy's field `algorithm` holds such a text. A plan resolves it: each transfer in its program carries the one name that the
rule picks for its bytes, so a resumed run sums as the first one did. `auto` is no rule yet: it stands for one that is made from
the measured cost of the links, before the plan is.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.comm.algorithms import named
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics

AUTO = "auto"
UNITS = MappingProxyType({"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})
EXAMPLE = 'an algorithm, or a rule such as "doubling <= 64 KiB, else ring"'
STEP = re.compile(r"(?P<name>[^\s<=]+)\s*<=\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+)", re.ASCII)
LAST, WORD = re.compile(r"else\s+(?P<name>[^\s<=]+)"), re.compile(r"(?!else$)(?P<name>[^\s<=]+)")


@dataclass(frozen=True)
class Rule:
    """Algorithms by message size: `steps` are (largest bytes, name), sizes rising; `last` is for all larger messages."""

    last: str
    steps: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"{name} <= {_size(nbytes)}, " for nbytes, name in self.steps)
        return f"{steps}else {self.last}" if steps else self.last

    @classmethod
    def parse(cls, text: str, where: str = "") -> "Rule":
        """The rule that `text` says; str() of a rule says it again. Raises PlanError with all that is wrong in it."""
        raise_diagnostics(_faults(text, where))
        steps, last = _parts(text)
        found = [step for part in steps if (step := STEP.fullmatch(part)) is not None]
        return cls(last, tuple((_nbytes(step), step["name"]) for step in found))

    @property
    def names(self) -> tuple[str, ...]:
        """The algorithms it may pick, each once."""
        return tuple(dict.fromkeys((*(name for _, name in self.steps), self.last)))

    def pick(self, nbytes: int) -> str:
        """The algorithm for a message of `nbytes`."""
        return next((name for most, name in self.steps if nbytes <= most), self.last)


def faults(text: str, size: int, where: str) -> Iterator[Diagnostic]:
    """What is wrong with the rule `text` among `size` ranks: its words, or an algorithm that cannot run there."""
    found = tuple(_faults(text, where))
    yield from found
    for name in () if found else Rule.parse(text).names:
        refusal = named(name).refusal(size)
        if refusal is not None:
            what, fix = refusal
            yield Diagnostic(f"{name}: {what}", fix, where)


def _parts(text: str) -> tuple[list[str], str]:
    """The steps of a rule, and the algorithm at its end; empty where the text does not say which."""
    *steps, last = [part.strip() for part in text.split(",")]
    found = LAST.fullmatch(last) or (None if steps else WORD.fullmatch(last))
    if found is not None:
        return steps, found["name"]
    return ([*steps, last] if STEP.fullmatch(last) else steps), ""


def _faults(text: str, where: str) -> Iterator[Diagnostic]:
    steps, last = _parts(text)
    if last == AUTO and not steps:
        fix = 'run `meshwright bench comm`, then name its file: cluster = "cluster.toml"'
        yield Diagnostic("auto needs the measured cost of the links", fix, where)
        return
    if not last and not steps:
        yield Diagnostic(
            f"'{text}' is neither an algorithm nor a rule by message size", f"write {EXAMPLE}", where
        )
    elif not last:
        fix = 'let it end with "else" and an algorithm, as in: doubling <= 64 KiB, else ring'
        yield Diagnostic(f"the rule '{text}' does not say what larger messages take", fix, where)
    most = 0
    for part in steps:
        step = STEP.fullmatch(part)
        if step is None:
            yield Diagnostic(
                f"'{part}' in the rule '{text}' is no algorithm with a size",
                "write it so: tree <= 1 MiB",
                where,
            )
            continue
        yield from _step_faults(step, most, where)
        most = _nbytes(step) if step["unit"] in UNITS else most
    if last:
        yield from _name_faults(last, where)


def _step_faults(step: re.Match[str], most: int, where: str) -> Iterator[Diagnostic]:
    yield from _name_faults(step["name"], where)
    if step["unit"] not in UNITS:
        yield Diagnostic(
            f"'{step['unit']}' in '{step[0]}' is no unit of a size",
            f"choose one of: {', '.join(UNITS)}",
            where,
        )
    elif _nbytes(step) <= most:
        text = f"'{step[0]}' is never reached: messages of up to {_size(most)} are taken before it"
        yield Diagnostic(text, "write the sizes in rising order, each above 0", where)


def _name_faults(name: str, where: str) -> Iterator[Diagnostic]:
    if name == AUTO:
        yield Diagnostic(
            "auto cannot be a part of a rule: it is a whole one, made from what was measured",
            "write auto alone",
            where,
        )
        return
    try:
        named(name)
    except PlanError as error:
        yield from (Diagnostic(fault.problem, fault.fix, where) for fault in error.diagnostics)


def _nbytes(step: re.Match[str]) -> int:
    return int(float(step["number"]) * UNITS[step["unit"]])


def _size(nbytes: int) -> str:
    unit = next(unit for unit, width in UNITS.items() if nbytes % width == 0) if nbytes else "B"
    return f"{nbytes // UNITS[unit]} {unit}"
