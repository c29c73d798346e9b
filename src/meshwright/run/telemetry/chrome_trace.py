"""A timeline of some steps, action by action, for https://ui.perfetto.dev and chrome://tracing.

With `run.trace_steps = n`, every rank profiles n steps and writes `trace/rank-N.json`. The first step of a
run warms up caches and is not traced, unless it is the only one.

    run       [data][step 2 ..........................................][save]
    compute   [forward(0) [F embed][F layers.0]...][LOSS][B ...][wait REDUCE(0)][CLIP][STEP]
    comm                                            [REDUCE(1) ...][REDUCE(0) ....]

Times are microseconds since the epoch by each rank's own clock: the files of one host are aligned, those of
several hosts only as well as their clocks agree. A comm event lasts from its issue until its result has
arrived, waiting for slower ranks included; overlapping events are drawn on separate rows. Exposed
communication is in the `wait` events of compute.

`otherData` holds the time of each traced step by part. Every moment of the compute stream counts once, for
the innermost event that covers it: forward (glue included), backward (loss included), exposed communication,
optimizer. The rest, such as packing of buckets and issuing of messages, is "other".
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.runtime.step_profiler import GLUE, WAIT, ProfilerSpan, StepProfiler
from meshwright.plan.hardware.streams import RUN_ROW, STREAMS, timeline_row, timeline_row_name
from meshwright.plan.job.file_format import TRACE
from meshwright.plan.step.single_device_program import FORWARD_KINDS, RECOMPUTE_KINDS
from meshwright.run.telemetry.atomic_write import replace_file

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
    **dict.fromkeys((*FORWARD_KINDS, *RECOMPUTE_KINDS), "forward"),
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoopPhase:
    """A phase of the loop around a step (data, step or save); `begin` and `end` are
    readings of perf_counter.
    """

    name: str
    begin: float
    end: float


def trace_path(folder: Path, rank: int) -> Path:
    """Returns the trace of `rank` inside the run's `folder`."""
    return folder / TRACE_FOLDER / f"rank-{rank}.json"


class StepTracer:
    """Profiles `num_traced` of the steps after `first` up to `last` on one rank, and writes them."""

    def __init__(
        self, folder: Path, rank: int, device: torch.device, num_traced: int, first: int, last: int
    ) -> None:
        self._path, self._rank, self._device = trace_path(folder, rank), rank, device
        begin = first + 1 if last == first + 1 else first + 2
        self._steps = range(begin, min(begin + num_traced, last + 1))
        self._watch: StepProfiler | None = None
        self._phases: list[LoopPhase] = []
        self._recorded: dict[int, tuple[list[ProfilerSpan], list[LoopPhase]]] = {}
        self._epoch = time.time() - time.perf_counter()

    def start_step(self, step: int) -> StepProfiler | None:
        """Returns the profiler of `step`; None if the step is not traced."""
        self._watch = StepProfiler(self._device) if step in self._steps else None
        return self._watch

    def add_phase(self, step: int, phase: LoopPhase) -> None:
        """Adds a phase of the loop if it belongs to a traced step."""
        if step in self._steps:
            self._phases.append(phase)

    def end_step(self, step: int) -> None:
        """Ends `step`, checkpoint included; after the last traced step, writes the file."""
        if self._watch is None:
            return
        self._recorded[step] = (self._watch.spans(), self._phases)
        self._watch, self._phases = None, []
        if step == self._steps[-1]:
            self.write()

    def write(self) -> None:
        """Writes the steps that were traced so far, if any. If the file cannot be written, logs a warning."""
        if not self._recorded:
            return
        splits = {str(step): split_by_part(spans, phases) for step, (spans, phases) in self._recorded.items()}
        events = [event for step in self._recorded for event in self._events(step)]
        document = {
            **TRACE.header,
            "displayTimeUnit": "ms",
            "otherData": {"rank": self._rank, "device": str(self._device), "seconds": splits},
            "traceEvents": [*self._names(events), *events],
        }
        try:
            replace_file(self._path, json.dumps(document))
        except OSError as error:
            logger.warning("the trace cannot be written to '%s': %s", self._path, error)
        self._recorded = {}

    def _names(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        rows = sorted({event["tid"] for event in events})
        metadata = [
            {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        ]
        for row in rows:
            name = timeline_row_name(row)
            metadata.append(
                {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": row, "args": {"name": name}}
            )
            metadata.append(
                {
                    "name": "thread_sort_index",
                    "ph": "M",
                    "pid": self._rank,
                    "tid": row,
                    "args": {"sort_index": row},
                }
            )
        return metadata

    def _events(self, step: int) -> list[dict[str, Any]]:
        spans, phases = self._recorded[step]
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
        ends: dict[int, list[float]] = defaultdict(list)  # by first row of a stream: when each is free again
        for span in sorted(spans, key=lambda span: span.begin):
            row = timeline_row(span.stream)
            if STREAMS[span.stream].starts_work:
                busy = ends[row]
                free = next((i for i, end in enumerate(busy) if end <= span.begin), len(busy))
                busy[free : free + 1] = [span.end]
                row += free
            events.append(self._event(span.name, span.kind, row, span, {"step": step, **_event_args(span)}))
        return events

    def _event(
        self,
        name: str,
        category: str,
        row: int,
        times: ProfilerSpan | LoopPhase,
        event_args: Mapping[str, Any],
    ) -> dict[str, Any]:
        begin, length = (times.begin + self._epoch) * 1e6, (times.end - times.begin) * 1e6
        where = {"ph": "X", "pid": self._rank, "tid": row, "ts": round(begin, 3), "dur": round(length, 3)}
        return {"name": name, "cat": category, **where, "args": dict(event_args)}


def split_by_part(spans: Sequence[ProfilerSpan], phases: Sequence[LoopPhase]) -> dict[str, float]:
    """Returns the seconds of one step by part (STEP_PARTS); all but data, evaluate and save add up to the
    time of the step.
    """
    seconds: dict[str, float] = defaultdict(float)
    for phase in phases:
        seconds["other" if phase.name == "step" else phase.name] += phase.end - phase.begin
    for span, own in _own_times([span for span in spans if span.stream == "compute"]):
        part = PART_OF_KIND.get(span.kind, "other")
        seconds[part] += own
        seconds["other"] -= own
    return {part: seconds[part] for part in STEP_PARTS}


def _own_times(spans: Sequence[ProfilerSpan]) -> list[tuple[ProfilerSpan, float]]:
    """Subtracts from each span the spans directly inside it. Spans of one stream are nested or disjoint."""
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


def _event_args(span: ProfilerSpan) -> dict[str, Any]:
    action = span.action
    if action is None:
        return {}
    event_args: dict[str, Any] = {
        "action": action.name,
        "subject": action.subject,
        "microbatch": action.microbatch,
        "flops": action.flops,
    }
    if action.transfer is not None:
        move = action.transfer
        event_args |= {
            "bytes": move.nbytes,
            "collective": move.collective,
            "axes": " x ".join(move.axes),
            "dtype": move.dtype,
        }
    return {
        key: value
        for key, value in event_args.items()
        if value not in ("", None) and not (key == "flops" and value == 0)
    }
