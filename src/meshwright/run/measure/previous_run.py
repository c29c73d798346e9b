"""Reads what a run's folder says about its machine: step times, where they were spent, and the time of its
messages.

    run_info.json         the device
    metrics.jsonl         seconds of every step; the first step of a process warms up and is left out
    trace/rank-N.json     the time of each message; only of a run with run.trace_steps

On each rank a message lasts until its result has arrived, waiting for slower ranks included. The last rank
waited for none, so the shortest time of a message over all ranks and traced steps counts.
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

from meshwright.plan.job.errors import (
    Diagnostic,
    PlanError,
    collect_diagnostics,
    raise_diagnostics,
    refuse_special_files,
)
from meshwright.plan.job.file_format import METRICS, RUN_INFO, TRACE, FileFormat
from meshwright.run.telemetry.chrome_trace import TRACE_FOLDER as TRACES
from meshwright.run.telemetry.metrics_log import METRICS_FILE
from meshwright.run.telemetry.run_info import RUN_INFO_FILE as ABOUT

MIN_STEPS = 10  # steps, without the first
EQUAL_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
)  # all ranks send as much, so no rank waits for another's result
COMPUTE_PARTS = ("forward", "backward", "optimizer", "other")
STEP_KEYS: Mapping[str, type | UnionType] = {
    "seconds": int | float,
    "data_s": int | float,
    "skipped": bool,
}  # of a line of a step
TRANSFER_KEYS: Mapping[str, type | UnionType] = {
    "step": int,
    "axes": str,
    "bytes": int,
}  # of an event of a message
RETRACE_FIX = (
    "trace steps again: --run.trace_steps 3; or remove the folder trace: then one "
    "factor corrects compute and messages"
)


@dataclass(frozen=True)
class TimedCollective:
    """A collective of a run and its time: `axes` are the mesh axes of its ranks."""

    collective: str
    axes: tuple[str, ...]
    nbytes: float
    seconds: float


class CollectiveKey(NamedTuple):
    """Identifies a collective of a step: the `index`th of its kind."""

    collective: str
    axes: str
    nbytes: int
    index: int


@dataclass(frozen=True)
class PreviousRun:
    """A run that ended: its device, and the median step time in seconds over `num_steps` steps.

    If it was traced, `compute_s` is the compute time of the slowest rank in a step, and `collectives` are
    its messages.
    """

    folder: Path
    device: str
    num_steps: int
    step_s: float
    compute_s: float | None
    collectives: tuple[TimedCollective, ...]


def read_previous_run(folder: Path) -> PreviousRun:
    """Reads the run in `folder`. Raises PlanError when it is no run, has too few steps, or with everything
    that is damaged.
    """
    where = str(folder)
    if not folder.is_dir():
        raise PlanError(
            "there is no such folder",
            fix="name the folder of a run: run.folder in its config",
            location=where,
        )
    diagnostics: list[Diagnostic] = []
    device = _device(folder / ABOUT, diagnostics)
    seconds = _steps(folder / METRICS_FILE, diagnostics)
    computed, messages = _read_traces(folder / TRACES, diagnostics)
    raise_diagnostics(diagnostics)
    if len(seconds) < MIN_STEPS:
        text = f"{len(seconds)} steps beyond the first were timed; needed are {MIN_STEPS} for a median"
        raise PlanError(text, fix=f"train longer: --train.steps {MIN_STEPS + 2} or more", location=where)
    return PreviousRun(folder, device, len(seconds), median(seconds), computed, messages)


def _text(path: Path, reason: str, diagnostics: list[Diagnostic]) -> str:
    try:
        refuse_special_files([path], "name another run")
        return path.read_text(encoding="utf-8")
    except PlanError as error:
        diagnostics += error.diagnostics
    except FileNotFoundError:
        text = f"there is no {path.name} in it: {reason}"
        diagnostics.append(
            Diagnostic(
                text, "name the folder of a run that has trained: run.folder in its config", str(path.parent)
            )
        )
    except (OSError, ValueError) as error:
        diagnostics.append(Diagnostic(f"the file cannot be read: {error}", "name another run", str(path)))
    return ""


def _json(
    text: str, path: Path, file_format: FileFormat, fix: str, diagnostics: list[Diagnostic]
) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError as error:
        diagnostics.append(Diagnostic(f"the file cannot be read: {error}", fix, str(path)))
        return None
    return collect_diagnostics(diagnostics, file_format.contents, document, str(path))


def _describe_lacking_keys(document: object, needed: Mapping[str, type | UnionType]) -> str:
    if not isinstance(document, dict):
        keys = f" with {', '.join(needed)}" if needed else ""
        return f"{json.dumps(document)[:40]} is written where a table{keys} is needed"
    bad = [key for key, kind in needed.items() if not isinstance(document.get(key), kind)]
    given = [f"{key} is {json.dumps(document[key])[:40]}" for key in bad if key in document]
    missing = [f"there is no {key}" for key in bad if key not in document]
    return ", ".join([*missing, *given])


def _device(path: Path, diagnostics: list[Diagnostic]) -> str:
    text = _text(path, "the run has not begun, or is not one of `meshwright train`", diagnostics)
    about = _json(text, path, RUN_INFO, "name another run", diagnostics) if text else None
    if about is None:
        return ""
    lacking = _describe_lacking_keys(about, {"machine": dict}) or _describe_lacking_keys(
        about["machine"], {"device": str, "processor": str}
    )
    if lacking:
        text = f"it does not say which device computed: {lacking}"
        diagnostics.append(
            Diagnostic(
                text, "name a run of this version of meshwright; its first steps write the file", str(path)
            )
        )
        return ""
    machine = about["machine"]
    return machine["processor"] if machine["device"] == "cpu" else machine["device"]


def _steps(path: Path, diagnostics: list[Diagnostic]) -> list[float]:
    found = []
    lines = _text(path, "no step was timed", diagnostics).splitlines()
    if lines and _json(lines[0], path, METRICS, "name another run", diagnostics) is None:
        return []
    for number, line in enumerate(lines[1:], start=2):
        try:
            document = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        if isinstance(document, dict) and document.get("kind"):
            continue
        lacking = _describe_lacking_keys(document, STEP_KEYS)
        took = 1.0 if lacking else document["seconds"] - document["data_s"]
        if not 0 < took < inf:
            lacking = f"{took:g} seconds without the wait for data, and needed is a number above 0"
        if lacking:
            fix = "remove the line, or name another run"
            diagnostics.append(
                Diagnostic(f"line {number} is not a step record of `train`: {lacking}", fix, str(path))
            )
        elif not document["skipped"]:
            found.append(took)
    return found[1:]


def _read_traces(
    folder: Path, diagnostics: list[Diagnostic]
) -> tuple[float | None, tuple[TimedCollective, ...]]:
    computed: list[float] = []
    shortest: dict[CollectiveKey, float] = {}
    for path in sorted(folder.glob("rank-*.json")):
        before = len(diagnostics)
        document = _json(_text(path, "", diagnostics), path, TRACE, RETRACE_FIX, diagnostics)
        if document is None or len(diagnostics) > before:
            continue
        wrong = _describe_trace_problem(document)
        if wrong:
            diagnostics.append(Diagnostic(f"no trace as `train` writes it: {wrong}", RETRACE_FIX, str(path)))
            continue
        computed.append(
            median(
                sum(parts[name] for name in COMPUTE_PARTS)
                for parts in document["otherData"]["seconds"].values()
            )
        )
        seen: Counter[tuple[int, str, str, int]] = Counter()
        for event in document["traceEvents"]:
            move = event.get("args", {})
            if move.get("collective") in EQUAL_COLLECTIVES:
                what = move["collective"], move["axes"], move["bytes"]
                number = seen[move["step"], *what]
                seen[move["step"], *what] += 1
                sent = CollectiveKey(*what, number)
                shortest[sent] = min(shortest.get(sent, inf), event["dur"] / 1e6)
    messages = tuple(
        TimedCollective(each.collective, tuple(each.axes.split(" x ")), each.nbytes, took)
        for each, took in shortest.items()
    )
    return (max(computed), messages) if computed else (None, ())


def _describe_trace_problem(document: Any) -> str:
    lacking = _describe_lacking_keys(
        document, {"otherData": dict, "traceEvents": list}
    ) or _describe_lacking_keys(document["otherData"], {"seconds": dict})
    if lacking:
        return lacking
    if not document["otherData"]["seconds"]:
        return "seconds of no step are in it, and needed are those of one"
    for step, parts in document["otherData"]["seconds"].items():
        if lacking := _describe_lacking_keys(parts, dict.fromkeys(COMPUTE_PARTS, int | float)):
            return f"of step {step} {lacking}"
        if not 0 < sum(parts[name] for name in COMPUTE_PARTS) < inf:
            return f"in step {step} nothing was computed"
    for number, event in enumerate(document["traceEvents"]):
        lacking = _describe_lacking_keys(event, {}) or _describe_lacking_keys(event.get("args", {}), {})
        if not lacking and event.get("args", {}).get("collective") in EQUAL_COLLECTIVES:
            lacking = _describe_lacking_keys(event["args"], TRANSFER_KEYS) or _describe_lacking_keys(
                event, {"dur": int | float}
            )
        if lacking:
            return f"of event {number} {lacking}"
    return ""
