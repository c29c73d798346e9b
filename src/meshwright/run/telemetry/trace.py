"""Some steps of a run, act by act, as a file that https://ui.perfetto.dev and chrome://tracing open.

With `run.trace_steps = n`, every rank watches n steps and writes `trace/rank-N.json`. The first step of a run warms caches
up and is not among them, unless it is the only one.

    run       [data][step 2 ..........................................][save]
    compute   [forward(0) [F embed][F layers.0]...][LOSS][B ...][wait REDUCE(0)][CLIP][STEP]
    wire                                             [REDUCE(1) ...][REDUCE(0) ....]

Times are microseconds since the epoch, by each rank's own clock: on one host the ranks' files lie on one line, between
hosts only as well as their clocks agree. A wire event lasts from its issue until its result has come, waiting for slower
ranks included; those that overlap are drawn on rows of their own. What nothing hides is in the `wait` events of compute.

`otherData` holds, per traced step, where its time went. Every moment of the compute lane counts once, for the innermost
event that covers it: forward (glue included), backward (the loss included), exposed communication, optimizer; what no
event covers, packing of buckets and issuing of messages is "other".
"""

import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.runtime.step_profiler import GLUE, WAIT, ProfilerSpan, StepProfiler

TRACE_FOLDER = "trace"
STEP_PARTS = (
    "data",
    "forward",
    "backward",
    "exposed communication",
    "optimizer",
    "evaluate",
    "save",
    "other",
)
PART_OF_KIND = {
    "F": "forward",
    "F_CHECKPOINTED": "forward",
    "RECOMPUTE": "forward",
    GLUE: "forward",
    "LOSS": "backward",
    "B": "backward",
    "I": "backward",
    "W": "backward",
    WAIT: "exposed communication",
    "CLIP": "optimizer",
    "STASH": "optimizer",
    "LOAD_STASHED": "optimizer",
    "LOAD_LATEST": "optimizer",
    "STEP": "optimizer",
}
RUN_ROW, COMPUTE_ROW, COMM_ROW = 0, 1, 2  # further rows of the wire follow

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopPhase:
    """A part of the loop round a step: data, step or save; begin and end are readings of perf_counter."""

    name: str
    begin: float
    end: float


def trace_path(folder: Path, rank: int) -> Path:
    """Where `rank` writes its trace, inside the run's `folder`."""
    return folder / TRACE_FOLDER / f"rank-{rank}.json"


class StepTracer:
    """Watches `num_traced` of the steps after `first` up to `last` on one rank, and writes them when all are seen."""

    def __init__(
        self, folder: Path, rank: int, device: torch.device, num_traced: int, first: int, last: int
    ) -> None:
        self._path, self._rank, self._device = trace_path(folder, rank), rank, device
        begin = first + 1 if last == first + 1 else first + 2
        self._steps = range(begin, min(begin + num_traced, last + 1))
        self._watch: StepProfiler | None = None
        self._phases: list[LoopPhase] = []
        self._seen: dict[int, tuple[list[ProfilerSpan], list[LoopPhase]]] = {}
        self._epoch = time.time() - time.perf_counter()

    def start_step(self, step: int) -> StepProfiler | None:
        """What the player shall tell of `step`; None when it is not traced."""
        self._watch = StepProfiler(self._device) if step in self._steps else None
        return self._watch

    def add_phase(self, step: int, phase: LoopPhase) -> None:
        """Note a phase of the loop, when it belongs to a traced step."""
        if step in self._steps:
            self._phases.append(phase)

    def end_step(self, step: int) -> None:
        """`step` is over, saving included; after the last traced one, the file is written."""
        if self._watch is None:
            return
        self._seen[step] = (self._watch.spans(), self._phases)
        self._watch, self._phases = None, []
        if step == self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Write what was seen so far, if anything. A file that cannot be written is a warning in the log."""
        if not self._seen:
            return
        splits = {str(step): split_by_part(spans, phases) for step, (spans, phases) in self._seen.items()}
        events = [event for step in self._seen for event in self._events(step)]
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"rank": self._rank, "device": str(self._device), "seconds": splits},
            "traceEvents": [*self._names(events), *events],
        }
        try:
            replace_file(self._path, json.dumps(document))
        except OSError as error:
            logger.warning("the trace cannot be written to '%s': %s", self._path, error)
        self._seen = {}

    def _names(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        names = {RUN_ROW: "run", COMPUTE_ROW: "compute", COMM_ROW: "comm"}
        rows = sorted({event["tid"] for event in events})
        said = [
            {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        ]
        for row in rows:
            name = names.get(row, f"wire ({row - COMM_ROW + 1})")
            said.append(
                {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": row, "args": {"name": name}}
            )
            said.append(
                {
                    "name": "thread_sort_index",
                    "ph": "M",
                    "pid": self._rank,
                    "tid": row,
                    "args": {"sort_index": row},
                }
            )
        return said

    def _events(self, step: int) -> list[dict[str, Any]]:
        spans, phases = self._seen[step]
        events = [
            self._event(
                f"step {step}" if phase.name == "step" else phase.name,
                phase.name,
                RUN_ROW,
                phase,
                {"step": step},
            )
            for phase in phases
        ]
        ends: list[float] = []  # per row of the wire, when it is free again
        for span in sorted(spans, key=lambda span: span.begin):
            row = COMPUTE_ROW
            if span.stream != "compute":
                free = next((i for i, end in enumerate(ends) if end <= span.begin), len(ends))
                ends[free : free + 1] = [span.end]
                row = COMM_ROW + free
            events.append(self._event(span.name, span.kind, row, span, {"step": step, **_said(span)}))
        return events

    def _event(
        self, name: str, category: str, row: int, times: ProfilerSpan | LoopPhase, said: Mapping[str, Any]
    ) -> dict[str, Any]:
        begin, length = (times.begin + self._epoch) * 1e6, (times.end - times.begin) * 1e6
        where = {"ph": "X", "pid": self._rank, "tid": row, "ts": round(begin, 3), "dur": round(length, 3)}
        return {"name": name, "cat": category, **where, "args": dict(said)}


def split_by_part(spans: Sequence[ProfilerSpan], phases: Sequence[LoopPhase]) -> dict[str, float]:
    """Seconds by part of one step (PARTS); all but data, evaluate and save add up to the time of the step."""
    seconds: dict[str, float] = defaultdict(float)
    for phase in phases:
        seconds["other" if phase.name == "step" else phase.name] += phase.end - phase.begin
    for span, own in _own_times([span for span in spans if span.stream == "compute"]):
        part = PART_OF_KIND.get(span.kind, "other")
        seconds[part] += own
        seconds["other"] -= own
    return {part: seconds[part] for part in STEP_PARTS}


def _own_times(spans: Sequence[ProfilerSpan]) -> list[tuple[ProfilerSpan, float]]:
    """Each span with its seconds less those of the spans directly inside it; spans of one lane are nested or apart."""
    own: list[float] = []
    open_spans: list[int] = []
    ordered = sorted(spans, key=lambda span: (span.begin, -span.end))
    for index, span in enumerate(ordered):
        while open_spans and ordered[open_spans[-1]].end <= span.begin:
            open_spans.pop()
        if open_spans:
            own[open_spans[-1]] -= span.end - span.begin
        own.append(span.end - span.begin)
        open_spans.append(index)
    return list(zip(ordered, own, strict=True))


def _said(span: ProfilerSpan) -> dict[str, Any]:
    """What an event says of its action."""
    action = span.action
    if action is None:
        return {}
    said: dict[str, Any] = {
        "action": action.name,
        "subject": action.subject,
        "microbatch": action.microbatch,
        "flops": action.flops,
    }
    if action.transfer is not None:
        move = action.transfer
        said |= {
            "bytes": move.nbytes,
            "collective": move.collective,
            "axes": " x ".join(move.axes),
            "dtype": move.dtype,
        }
    return {
        key: value
        for key, value in said.items()
        if value not in ("", None) and not (key == "flops" and value == 0)
    }


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path`, making its folder; a reader sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
