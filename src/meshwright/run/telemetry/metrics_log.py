"""The metrics of a run as JSON lines, and the check that a resumed run repeats them.

The first line names format and version ("header"). A line without `kind` is a global step. "evaluation" is a
loss on held-out samples after a step, "tasks" are the metrics of tasks (`eval/hellaswag/acc`), "sample" is a
text that the model has written; "spike" is a step that the loss guard judged harmful, with what each rank's
samples did; "expert_load" is how many tokens chose each expert since the last such line.

After a kill, a run resumes from its last checkpoint and repeats some steps whose lines are in the file
already. A repeated step must give a bit-identical loss and gradient norm, an evaluation the same loss;
`ReplayCheck` holds the result. A line that the kill cut short is removed, new lines are appended.

    step 41 .. 47      then a kill; the last checkpoint is of step 40
    step 41 .. 47      repeated: identical, so nothing is written; 48, 49 ... are appended

A step that differs (the plan or the data changed) is appended too: of several lines of one kind and step,
the last one counts.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.plan.job.errors import PlanError, refuse_write_errors
from meshwright.plan.job.file_format import METRICS

METRICS_FILE = "metrics.jsonl"
HEADER, STEP, EVALUATION, TASKS = "header", "", "evaluation", "tasks"
SPIKE, EXPERT_LOAD, SAMPLE = "spike", "expert_load", "sample"
METRIC_OF_TASK = "eval/"  # begins its name
EXACT_KEYS = {
    STEP: ("loss", "grad_norm", "tokens"),
    EVALUATION: ("loss", "tokens"),
    TASKS: (),  # and their metrics, which need not be the same ones
    SAMPLE: ("text",),
    SPIKE: ("loss", "grad_norm"),
    EXPERT_LOAD: (),  # a resumed run may begin within the steps of a line
}


@dataclass
class ReplayCheck:
    """The number of repeated steps, and the first line that differs, as (old, new)."""

    num_steps: int = 0
    first_step: int | None = None
    first_difference: tuple[dict[str, Any], dict[str, Any]] | None = None

    def __str__(self) -> str:
        if not self.num_steps:
            return ""
        if self.first_difference is None:
            if self.num_steps == 1:
                return f"step {self.first_step} was repeated and is bit-identical"
            return f"{self.num_steps} steps were repeated from step {self.first_step}: all are bit-identical"
        old, new = self.first_difference
        pairs = ", ".join(f"{key} {old[key]!r} then, {new[key]!r} now" for key in _differing_keys(old, new))
        what = f"the {old['kind']} at step" if old.get("kind") else "step"
        return f"{what} {old['step']} was repeated and differs: {pairs}"


class MetricsLog:
    """`metrics.jsonl` in the run's folder, written by rank 0. `known_lines` are the lines of an earlier
    start, by kind and step.

    Raises PlanError when the file has another format or version, a complete line of it is not a line of
    metrics, or a line cannot be written (a full disk).
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS_FILE
        self.known_lines = self._read()
        self.replay = ReplayCheck()
        self._file = self.path.open("a", encoding="ascii")
        if not self._file.tell():
            self._append({"kind": HEADER, **METRICS.header})

    def write(self, line: dict[str, Any]) -> None:
        """Appends a line. If the line was written before, compares both, and appends the new one only if it
        differs.
        """
        old = self.known_lines.get(_key(line))
        if old is not None:
            if not line.get("kind"):
                self.replay.num_steps += 1
                self.replay.first_step = self.replay.first_step or line["step"]
            differing, missing = _differing_keys(old, line), _exact(line) - old.keys()
            if not differing and not missing:
                return
            if differing:
                self.replay.first_difference = self.replay.first_difference or (old, line)
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        fix = "make room on the disk, then start the same run again: it continues from its last checkpoint"
        with refuse_write_errors("the metrics", self.path, fix):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):  # of a line that could not be written: `write` has raised it
            self._file.close()

    def _read(self) -> dict[tuple[str, int], dict[str, Any]]:
        if not self.path.exists():
            return {}
        raw = self.path.read_bytes()
        end = raw.rfind(b"\n") + 1
        if end < len(raw):  # the kill came in the middle of a line
            os.truncate(self.path, end)
        known = dict[tuple[str, int], dict[str, Any]]()
        for line in read_metrics(self.path):
            known[_key(line)] = {**known.get(_key(line), {}), **line}  # two may be of other tasks
        return known


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of the file `path` without its header.

    Raises PlanError for another format or version, and for a line that is not one of metrics.
    """
    lines = path.read_bytes().splitlines()
    if lines:
        METRICS.contents(_object(lines[0]), f"{path}:1")
    return [_line(text, f"{path}:{number}") for number, text in enumerate(lines[1:], start=2)]


def _key(line: dict[str, Any]) -> tuple[str, int]:
    return line.get("kind", STEP), line["step"]


def _exact(line: dict[str, Any]) -> set[str]:
    return {*EXACT_KEYS[line.get("kind", STEP)], *(key for key in line if key.startswith(METRIC_OF_TASK))}


def _differing_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the keys that are in both lines, in order, and must be equal and are not."""
    shared = [key for key in new if key in _exact(new) and key in old]
    return [key for key in shared if repr(old[key]) != repr(new[key])]  # repr: a NaN equals a NaN


def _object(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _line(text: bytes, where: str) -> dict[str, Any]:
    line = _object(text)
    kind = str(line.get("kind", STEP)) if isinstance(line, dict) else ""
    if not isinstance(line, dict) or kind not in EXACT_KEYS or not {"step", *EXACT_KEYS[kind]} <= line.keys():
        what = f"this line is not one of metrics: {text[:60].decode(errors='replace')!r}"
        raise PlanError(
            what, fix="remove the line, or move the file away: the steps are written again", location=where
        )
    return line
