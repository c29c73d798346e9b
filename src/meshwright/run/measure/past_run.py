"""What a run's folder tells of its machine: seconds of its steps, where they went, what its messages took.

    about.json            the device
    metrics.jsonl         seconds of every step; the first of a process warms up and is left out
    trace/rank-N.json     where steps went, message by message; only of a run with run.trace_steps

A message lasts on each rank until its result has come, waiting for slower ranks included. The rank that came last waited for
nobody, so of all ranks and all traced steps the shortest time of a message counts.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, NamedTuple

from meshwright.plan.job.errors import Fault, PlanError, raise_faults
from meshwright.run.telemetry.run_info import NAME as ABOUT
from meshwright.run.telemetry.trace import FOLDER as TRACES

JOURNAL = "metrics.jsonl"
LEAST = 10  # steps, without the first
MEETINGS = ("all_reduce", "all_gather", "reduce_scatter")  # in which all send as much: nobody waits for what another computes
COMPUTED = ("forward", "backward", "optimizer", "other")
STEP: Mapping[str, type | UnionType] = {"seconds": int | float, "data_s": int | float, "skipped": bool}  # of a line of a step
MOVE: Mapping[str, type | UnionType] = {"step": int, "axes": str, "bytes": int}  # of an event of a message
AGAIN = "trace steps again: --run.trace_steps 3; or remove the folder trace: then one factor stands for computing and sending"


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
    """What the run in `folder` tells. Raises PlanError when it is no run or has too few steps, or with all that is damaged."""
    where = str(folder)
    if not folder.is_dir():
        raise PlanError("there is no such folder", fix="name the folder of a run: run.folder in its config", where=where)
    faults: list[Fault] = []
    device = _device(folder / ABOUT, faults)
    seconds = _steps(folder / JOURNAL, faults)
    computed, messages = _traced(folder / TRACES, faults)
    raise_faults(faults)
    if len(seconds) < LEAST:
        text = f"{len(seconds)} steps beyond the first were timed; needed are {LEAST} for a median"
        raise PlanError(text, fix=f"train longer: --train.steps {LEAST + 2} or more", where=where)
    return Past(folder, device, len(seconds), median(seconds), computed, messages)


def _text(path: Path, reason: str, faults: list[Fault]) -> str:
    """What the file says; "" where it is not there, for this `reason`, or cannot be read: a fault."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        text = f"there is no {path.name} in it: {reason}"
        faults.append(Fault(text, "name the folder of a run that has trained: run.folder in its config", str(path.parent)))
    except (OSError, ValueError) as error:
        faults.append(Fault(f"the file cannot be read: {error}", "name another run", str(path)))
    return ""


def _json(text: str, path: Path, fix: str, faults: list[Fault]) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        faults.append(Fault(f"the file cannot be read: {error}", fix, str(path)))
    return None


def _lacking(said: object, needed: Mapping[str, type | UnionType]) -> str:
    """Which keys are not there, or are not what is `needed`, in words; "": none of them."""
    if not isinstance(said, dict):
        keys = f" with {', '.join(needed)}" if needed else ""
        return f"{json.dumps(said)[:40]} stands where a table{keys} is needed"
    bad = [key for key, kind in needed.items() if not isinstance(said.get(key), kind)]
    given = [f"{key} is {json.dumps(said[key])[:40]}" for key in bad if key in said]
    missing = [f"there is no {key}" for key in bad if key not in said]
    return ", ".join([*missing, *given])


def _device(path: Path, faults: list[Fault]) -> str:
    """What computed."""
    text = _text(path, "the run has not begun, or is not one of `meshwright train`", faults)
    about = _json(text, path, "name another run", faults) if text else None
    if about is None:
        return ""
    lacking = _lacking(about, {"machine": dict}) or _lacking(about["machine"], {"device": str, "processor": str})
    if lacking:
        text = f"it does not say which device computed: {lacking}"
        faults.append(Fault(text, "name a run of this version of meshwright; its first steps write the file", str(path)))
        return ""
    machine = about["machine"]
    return machine["processor"] if machine["device"] == "cpu" else machine["device"]


def _steps(path: Path, faults: list[Fault]) -> list[float]:
    """Seconds of each step but the first and those that were left out, without the wait for data."""
    found = []
    for number, line in enumerate(_text(path, "no step was timed", faults).splitlines(), start=1):
        try:
            said = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(said, dict) and said.get("kind"):
            continue
        lacking = _lacking(said, STEP)
        took = 1.0 if lacking else said["seconds"] - said["data_s"]
        if not 0 < took < inf:
            lacking = f"{took:g} seconds without the wait for data, and needed is a number above 0"
        if lacking:
            fix = "remove the line, or name another run"
            faults.append(Fault(f"line {number} is no step as `train` writes it: {lacking}", fix, str(path)))
        elif not said["skipped"]:
            found.append(took)
    return found[1:]


def _traced(folder: Path, faults: list[Fault]) -> tuple[float | None, tuple[Message, ...]]:
    """Seconds that the slowest rank computed in a traced step, and the shortest time of each message."""
    computed: list[float] = []
    shortest: dict[Sent, float] = {}
    for path in sorted(folder.glob("rank-*.json")):
        before = len(faults)
        said = _json(_text(path, "", faults), path, AGAIN, faults)
        if len(faults) > before:
            continue
        wrong = _untraced(said)
        if wrong:
            faults.append(Fault(f"no trace as `train` writes it: {wrong}", AGAIN, str(path)))
            continue
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


def _untraced(said: Any) -> str:
    """What keeps a document from being a trace, in words; "": nothing."""
    lacking = _lacking(said, {"otherData": dict, "traceEvents": list}) or _lacking(said["otherData"], {"seconds": dict})
    if lacking:
        return lacking
    if not said["otherData"]["seconds"]:
        return "seconds of no step are in it, and needed are those of one"
    for step, parts in said["otherData"]["seconds"].items():
        if lacking := _lacking(parts, dict.fromkeys(COMPUTED, int | float)):
            return f"of step {step} {lacking}"
        if not 0 < sum(parts[name] for name in COMPUTED) < inf:
            return f"in step {step} nothing was computed"
    for number, event in enumerate(said["traceEvents"]):
        lacking = _lacking(event, {}) or _lacking(event.get("args", {}), {})
        if not lacking and event.get("args", {}).get("collective") in MEETINGS:
            lacking = _lacking(event["args"], MOVE) or _lacking(event, {"dur": int | float})
        if lacking:
            return f"of event {number} {lacking}"
    return ""
