"""What a run's folder tells of its machine: seconds of its steps, where they went, what its messages took.

    about.json            the device
    metrics.jsonl         seconds of every step; the first of a process warms up and is left out
    trace/rank-N.json     where steps went, message by message; only of a run with run.trace_steps

A message lasts on each rank until its result has come, waiting for slower ranks included. The rank that came last waited for
nobody, so of all ranks and all traced steps the shortest time of a message counts.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from meshwright.core.errors import PlanError
from meshwright.run.about import NAME as ABOUT
from meshwright.run.trace import FOLDER as TRACES

JOURNAL = "metrics.jsonl"
LEAST = 10  # steps, without the first
MEETINGS = ("all_reduce", "all_gather", "reduce_scatter")  # in which all send as much: nobody waits for what another computes
COMPUTED = ("forward", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Message:
    """A collective that a run issued, and what it took: `axes` are those along which its ranks lie."""

    collective: str
    axes: tuple[str, ...]
    nbytes: float
    seconds: float


class Sent(NamedTuple):
    """Which message of a step it is: the `number`th of its kind."""

    collective: str
    axes: str
    nbytes: int
    number: int


@dataclass(frozen=True)
class Past:
    """A run that was: the device that computed, and the median of so many steps, in seconds.

    Where it was traced, `computed_s` are the seconds that the slowest rank computed in a step, and `messages` what was sent.
    """

    folder: Path
    device: str
    steps: int
    step_s: float
    computed_s: float | None
    messages: tuple[Message, ...]


def past(folder: Path) -> Past:
    """What the run in `folder` tells. Raises PlanError when it is no run, or has too few steps."""
    where = str(folder)
    if not folder.is_dir():
        raise PlanError("there is no such folder", fix="name the folder of a run: run.folder in its config", where=where)
    about = _json(folder / ABOUT, "the run has not begun, or is not one of `meshwright train`")
    seconds = list(_steps(folder / JOURNAL))
    if len(seconds) < LEAST:
        text = f"{len(seconds)} steps beyond the first were timed; needed are {LEAST} for a median"
        raise PlanError(text, fix=f"train longer: --train.steps {LEAST + 2} or more", where=where)
    computed, messages = _traced(folder)
    machine = about["machine"]
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    return Past(folder, device, len(seconds), median(seconds), computed, messages)


def _json(path: Path, reason: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        text = f"there is no {path.name} in it: {reason}"
        raise PlanError(text, fix="name the folder of a run: run.folder in its config", where=str(path.parent)) from error
    except (OSError, ValueError) as error:
        raise PlanError(f"the file cannot be read: {error}", fix="name another run", where=str(path)) from error


def _steps(path: Path) -> Iterator[float]:
    """Seconds of each step but the first and those that were left out, without the wait for data."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        text = f"there is no {path.name} in it: no step was timed"
        raise PlanError(text, fix="name the folder of a run that has trained", where=str(path.parent)) from error
    found = []
    for line in lines:
        try:
            said = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if not said.get("kind") and not said["skipped"]:
            found.append(said["seconds"] - said["data_s"])
    yield from found[1:]


def _traced(folder: Path) -> tuple[float | None, tuple[Message, ...]]:
    """Seconds that the slowest rank computed in a traced step, and the shortest time of each message."""
    computed: list[float] = []
    shortest: dict[Sent, float] = {}
    for path in sorted((folder / TRACES).glob("rank-*.json")):
        said = _json(path, "")
        computed.append(median(sum(parts[name] for name in COMPUTED) for parts in said["otherData"]["seconds"].values()))
        seen: Counter[tuple[int, str, str, int]] = Counter()
        for event in said["traceEvents"]:
            move = event.get("args", {})
            if move.get("collective") in MEETINGS:
                what = move["collective"], move["axes"], move["bytes"]
                number = seen[move["step"], *what]
                seen[move["step"], *what] += 1
                sent = Sent(*what, number)
                shortest[sent] = min(shortest.get(sent, inf), event["dur"] / 1e6)
    messages = tuple(
        Message(each.collective, tuple(each.axes.split(" x ")), each.nbytes, took) for each, took in shortest.items()
    )
    return (max(computed), messages) if computed else (None, ())
