"""Reads the folder of a run, also of a run that was killed or is still going.

    metrics.jsonl       a line per step, and lines of a `kind` (evaluation, expert_load ...); of several of
                        one step the last counts
    plan.toml           every key of the plan
    run_info.json       summary of the plan, its program, versions, machine
    ranks/rank-N.json   seconds, memory and bytes sent, per rank
    trace/rank-N.json   traced steps, action by action

Only metrics or a plan must exist. Nothing is written or run, and neither the model nor the data is needed.
Missing or damaged files become notes.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import METRICS, PLAN, RANK_USAGE, RUN_INFO, TRACE, FileFormat
from meshwright.plan.step.program import Program
from meshwright.plan.step.program_json import program_from_dict

JSONObject = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it. `steps`, `evaluations`, `expert_loads`, `tasks` and `samples` are lines
    of metrics in order of their step.
    """

    name: str
    steps: list[JSONObject]
    evaluations: list[JSONObject]
    settings: Mapping[str, Any]
    run_info: JSONObject = field(default_factory=dict)
    program: Program | None = None
    rank_accounts: Mapping[int, JSONObject] = field(default_factory=dict)
    traces: Mapping[int, JSONObject] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    expert_loads: Sequence[JSONObject] = ()
    tasks: Sequence[JSONObject] = ()
    samples: Sequence[JSONObject] = ()

    @property
    def world(self) -> int:
        """The number of ranks, as far as it is known."""
        return int(self.run_info.get("world", len(self.rank_accounts) or 1))


def read_run_record(folder: Path) -> RunRecord:
    """Returns what the run in `folder` recorded. Raises PlanError for a folder that is not a run's."""
    _check_run_folder(folder)
    notes: list[str] = []
    lines = list(_metric_lines(folder / "metrics.jsonl", notes))
    steps = {line["step"]: line for line in lines if not line.get("kind") and "loss" in line}
    evaluations, loads, samples = (
        {line["step"]: line for line in lines if line.get("kind") == kind}
        for kind in ("evaluation", "expert_load", "sample")
    )
    tasks: dict[int, JSONObject] = {}
    for line in (each for each in lines if each.get("kind") == "tasks"):
        tasks[line["step"]] = {**tasks.get(line["step"], {}), **line}  # each may be of other tasks
    about = _read_object(folder / "run_info.json", RUN_INFO, notes)
    program = _program(about, notes)
    world = about.get("world")
    ranks = _by_rank(folder / "ranks", RANK_USAGE, world, notes)
    traces = _by_rank(folder / "trace", TRACE, world, notes)
    if not steps:
        notes.append("no step has ended yet")
    return RunRecord(
        folder.resolve().name,
        [steps[step] for step in sorted(steps)],
        [evaluations[step] for step in sorted(evaluations)],
        _settings(folder / "plan.toml", notes),
        about,
        program,
        ranks,
        {rank: trace for rank, trace in traces.items() if isinstance(trace.get("traceEvents"), list)},
        tuple(notes),
        [loads[step] for step in sorted(loads)],
        [tasks[step] for step in sorted(tasks)],
        [samples[step] for step in sorted(samples)],
    )


def plan_differences(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns the keys in which the plans of `records` differ, each with the value in every plan.

    Without names of places and files.
    """
    skipped = ("plan_hash", "meshwright", "run.folder")
    keys = dict.fromkeys(key for record in records for key in record.settings if key not in skipped)
    found = {key: tuple(_format_value(record.settings.get(key)) for record in records) for key in keys}
    return [(key, values) for key, values in found.items() if len(set(values)) > 1]


def _format_value(value: object) -> str:
    return "(not set)" if value is None else str(value)


def _check_run_folder(folder: Path) -> None:
    if any((folder / name).is_file() for name in ("metrics.jsonl", "plan.toml")):
        return
    fix = "name a run's folder: the run.folder of its config"
    if not folder.exists():
        raise PlanError("there is no such folder", fix=fix, location=str(folder))
    if not folder.is_dir():
        raise PlanError(
            "this is a file; needed is the folder of a run", fix=f"try {folder.parent}", location=str(folder)
        )
    inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    fix = f"name one of the runs in it: {', '.join(inside[:5])}" if inside else fix
    raise PlanError(
        "no run was here: there is no metrics.jsonl and no plan.toml", fix=fix, location=str(folder)
    )


def _metric_lines(path: Path, notes: list[str]) -> Iterator[JSONObject]:
    if not path.is_file() or not path.stat().st_size:
        return
    header, *texts = path.read_bytes().split(b"\n")
    if _contents(header, path, METRICS, notes) is None:
        return
    for number, text in enumerate(texts, start=2):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line
        elif number == 1 + len(texts):
            notes.append("the last line of metrics.jsonl is not whole yet, and was left out")
        else:
            notes.append(f"line {number} of metrics.jsonl cannot be read, and was left out")


def _read_object(path: Path, file_format: FileFormat, notes: list[str]) -> dict[str, Any]:
    return (_contents(path.read_bytes(), path, file_format, notes) or {}) if path.is_file() else {}


def _contents(text: bytes, path: Path, file_format: FileFormat, notes: list[str]) -> dict[str, Any] | None:
    """The JSON object `text` of `path`; None, with a note, if it is damaged or of another format."""
    try:
        return file_format.contents(json.loads(text), str(path))
    except ValueError:
        notes.append(f"{path.name} cannot be read, and was left out")
    except PlanError as error:
        notes.append(f"{path.name} was left out: {error.diagnostics[0].problem}")
    return None


def _by_rank(folder: Path, file_format: FileFormat, world: object, notes: list[str]) -> dict[int, JSONObject]:
    """The object of each rank; files of ranks beyond `world` are left from an earlier start."""
    found = {}
    for path in folder.glob("rank-*.json"):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and not (isinstance(world, int) and int(number) >= world):
            said = _read_object(path, file_format, notes)
            found |= {int(number): said} if said else {}
    return dict(sorted(found.items()))


def _program(about: JSONObject, notes: list[str]) -> Program | None:
    if "program" not in about:
        return None
    try:
        return program_from_dict(about["program"])
    except (KeyError, TypeError, ValueError, AttributeError):
        notes.append("the program in run_info.json cannot be read, and was left out")
        return None


def _settings(path: Path, notes: list[str]) -> dict[str, Any]:
    """The keys of a plan file, dotted; strategies by their position."""
    if not path.is_file():
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        return dict(_flat(PLAN.contents(document, str(path))))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        notes.append("plan.toml cannot be read, and was left out")
    except PlanError as error:
        notes.append(f"plan.toml was left out: {error.diagnostics[0].problem}")
    return {}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for place, item in enumerate(value):
                yield from _flat(item, f"{prefix}{key}.{item.get('name', place)}.")
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
