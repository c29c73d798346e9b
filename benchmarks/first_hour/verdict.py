"""The verdict on a mistake, by two attempts: as the user made it, and after the printed repair."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.first_hour.mistake import Change, Mistake, with_changes
from benchmarks.first_hour.outcome import (
    REFUSED,
    TIMED_OUT,
    Outcome,
    attempt,
    lay_out,
    run_command,
    run_script,
    training_beside,
    write_file,
)

GOOD: tuple[str, ...] = ("refused with a repair that works", "warned")
VerdictWord = Literal[
    "refused with a repair that works",
    "warned",
    "silent",
    "traceback",
    "hangs",
    "another diagnosis",
    "repair does not work",
]
TRACEBACK = "Traceback (most recent call last)"
NEGATIVE = 1  # `verify` says that a plan does not equal one device


@dataclass(frozen=True)
class MistakeReport:
    """The verdict on a mistake, what was printed first, and what was printed after the repair."""

    verdict: VerdictWord
    message: str
    afterwards: str


def try_mistake(mistake: Mistake, folder: Path) -> MistakeReport:
    """Makes the mistake in `folder`, which is empty, follows the repair, and returns the verdict."""
    lay_out(folder)
    for line in mistake.before:
        _require(mistake, run_command(line, folder))
    if mistake.prepare:
        _require(mistake, run_script(mistake.prepare, folder))
    with training_beside(mistake.beside, folder) if mistake.beside else nullcontext():
        return _try_prepared(mistake, folder)


def _try_prepared(mistake: Mistake, folder: Path) -> MistakeReport:
    _change_files(mistake.write, mistake.replace, folder)
    first = attempt(mistake, mistake.run or mistake.script, folder)
    found = verdict_on_message(mistake, first)
    if found not in GOOD:
        return MistakeReport(found, first.printed, "")
    _change_files(mistake.write_after, mistake.replace_after, folder)
    second = attempt(mistake, mistake.repaired(), folder)
    if not repair_worked(mistake, second):
        found = "repair does not work"
    return MistakeReport(found, first.printed, second.printed)


def verdict_on_message(mistake: Mistake, outcome: Outcome) -> VerdictWord:
    """Returns the verdict on what was said to the mistake, if the repair works."""
    printed = " ".join(outcome.printed.split())
    if outcome.exit_code == TIMED_OUT:
        return "hangs"
    if outcome.exit_code not in (0, NEGATIVE, REFUSED) or TRACEBACK in outcome.printed:
        return "traceback"
    is_said = all(words in printed for words in mistake.says)
    is_said = is_said and mistake.repair in printed_repairs(outcome.printed)
    if outcome.exit_code == 0 and not is_said:
        return "silent"
    if not is_said or (outcome.exit_code == 0) != (mistake.verdict == "warned"):
        return "another diagnosis"
    return "warned" if mistake.verdict == "warned" else "refused with a repair that works"


def repair_worked(mistake: Mistake, outcome: Outcome) -> bool:
    """Returns whether the second attempt ended well, without the message of the first."""
    printed = " ".join(outcome.printed.split())
    return outcome.exit_code == 0 and not all(words in printed for words in mistake.says)


def printed_repairs(printed: str) -> str:
    """Returns the repairs among the lines of a message; all of it where no line is one."""
    _, *repairs = printed.split("repair: ")
    return " ".join(line.partition("\n")[0] for line in repairs) or " ".join(printed.split())


def _require(mistake: Mistake, outcome: Outcome) -> None:
    if outcome.exit_code:
        raise ValueError(f"'{mistake.name}' cannot be tried:\n{outcome.printed}")


def _change_files(write: Mapping[str, str], replace: Mapping[str, Sequence[Change]], folder: Path) -> None:
    for name, text in write.items():
        write_file(folder / name, text)
    for name, changes in replace.items():
        path = folder / name
        path.write_text(with_changes(path.read_text(encoding="utf-8"), changes), encoding="utf-8")
