"""Chooses an all-reduce algorithm by message size, with a rule written in one line.

    recursive_doubling <= 64 KiB, tree <= 1 MiB, else ring     up to 64 KiB by recursive doubling, and so on
    ring                                                       all messages by one algorithm

A strategy's field `algorithm` holds such a text. The plan resolves it: each transfer in its program carries
the one name that the rule gives for its bytes, so a resumed run sums in the same order as the first one.
`auto` is not a rule: it is replaced by one that is computed from the measured cost of the links before the
plan is made.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.comm.allreduce import get_algorithm
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics

AUTO = "auto"
SIZE_UNITS = MappingProxyType({"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})
RULE_EXAMPLE = 'an algorithm, or a rule such as "recursive_doubling <= 64 KiB, else ring"'
THRESHOLD_PATTERN = re.compile(
    r"(?P<name>[^\s<=]+)\s*<=\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+)", re.ASCII
)
ELSE_PATTERN, NAME_PATTERN = (
    re.compile(r"else\s+(?P<name>[^\s<=]+)"),
    re.compile(r"(?!else$)(?P<name>[^\s<=]+)"),
)


@dataclass(frozen=True)
class SizeRule:
    """Algorithms by message size: `thresholds` are (largest bytes, name), rising.

    `default_algorithm` is for larger messages.
    """

    default_algorithm: str
    thresholds: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        steps = "".join(f"{name} <= {_format_size(nbytes)}, " for nbytes, name in self.thresholds)
        return f"{steps}else {self.default_algorithm}" if steps else self.default_algorithm

    @classmethod
    def parse(cls, text: str, location: str = "") -> "SizeRule":
        """Returns the rule written in `text`; str() is the inverse.

        Raises PlanError with everything that is wrong in it.
        """
        raise_diagnostics(_text_diagnostics(text, location))
        steps, last = _split_rule(text)
        found = [step for part in steps if (step := THRESHOLD_PATTERN.fullmatch(part)) is not None]
        return cls(last, tuple((_threshold_nbytes(step), step["name"]) for step in found))

    @property
    def algorithm_names(self) -> tuple[str, ...]:
        """The algorithms that the rule may choose, each once."""
        return tuple(dict.fromkeys((*(name for _, name in self.thresholds), self.default_algorithm)))

    def algorithm_for(self, nbytes: int) -> str:
        """Returns the algorithm for a message of `nbytes`."""
        return next((name for most, name in self.thresholds if nbytes <= most), self.default_algorithm)


def rule_diagnostics(text: str, size: int, location: str) -> Iterator[Diagnostic]:
    """Yields what is wrong with the rule `text` among `size` ranks.

    Its syntax, or an algorithm that cannot run there.
    """
    found = tuple(_text_diagnostics(text, location))
    yield from found
    for name in () if found else SizeRule.parse(text).algorithm_names:
        refusal = get_algorithm(name).refusal(size)
        if refusal is not None:
            what, fix = refusal
            yield Diagnostic(f"{name}: {what}", fix, location)


def _split_rule(text: str) -> tuple[list[str], str]:
    """The thresholds of a rule as texts, and its default algorithm; "" where the text names none."""
    *steps, last = [part.strip() for part in text.split(",")]
    found = ELSE_PATTERN.fullmatch(last) or (None if steps else NAME_PATTERN.fullmatch(last))
    if found is not None:
        return steps, found["name"]
    return ([*steps, last] if THRESHOLD_PATTERN.fullmatch(last) else steps), ""


def _text_diagnostics(text: str, location: str) -> Iterator[Diagnostic]:
    steps, last = _split_rule(text)
    if last == AUTO and not steps:
        fix = 'run `meshwright bench network`, then name its file: cluster = "cluster.toml"'
        yield Diagnostic("auto needs the measured cost of the links", fix, location)
        return
    if not last and not steps:
        yield Diagnostic(
            f"'{text}' is neither an algorithm nor a rule by message size", f"write {RULE_EXAMPLE}", location
        )
    elif not last:
        fix = 'let it end with "else" and an algorithm, as in: recursive_doubling <= 64 KiB, else ring'
        yield Diagnostic(f"the rule '{text}' does not say what larger messages take", fix, location)
    most = 0
    for part in steps:
        step = THRESHOLD_PATTERN.fullmatch(part)
        if step is None:
            yield Diagnostic(
                f"'{part}' in the rule '{text}' is not an algorithm with a size",
                "write it so: tree <= 1 MiB",
                location,
            )
            continue
        yield from _threshold_diagnostics(step, most, location)
        most = _threshold_nbytes(step) if step["unit"] in SIZE_UNITS else most
    if last:
        yield from _name_diagnostics(last, location)


def _threshold_diagnostics(step: re.Match[str], previous_nbytes: int, location: str) -> Iterator[Diagnostic]:
    yield from _name_diagnostics(step["name"], location)
    if step["unit"] not in SIZE_UNITS:
        yield Diagnostic(
            f"'{step['unit']}' in '{step[0]}' is not a unit of size",
            f"choose one of: {', '.join(SIZE_UNITS)}",
            location,
        )
    elif _threshold_nbytes(step) <= previous_nbytes:
        text = (
            f"'{step[0]}' is never reached: messages of up to {_format_size(previous_nbytes)} are taken "
            "before it"
        )
        yield Diagnostic(text, "write the sizes in rising order, each above 0", location)


def _name_diagnostics(name: str, location: str) -> Iterator[Diagnostic]:
    if name == AUTO:
        yield Diagnostic(
            "auto cannot be a part of a rule: it is a complete rule, made from measurements",
            "write auto alone",
            location,
        )
        return
    try:
        get_algorithm(name)
    except PlanError as error:
        yield from (Diagnostic(each.problem, each.fix, location) for each in error.diagnostics)


def _threshold_nbytes(step: re.Match[str]) -> int:
    return int(float(step["number"]) * SIZE_UNITS[step["unit"]])


def _format_size(nbytes: int) -> str:
    unit = next(unit for unit, width in SIZE_UNITS.items() if nbytes % width == 0) if nbytes else "B"
    return f"{nbytes // SIZE_UNITS[unit]} {unit}"
