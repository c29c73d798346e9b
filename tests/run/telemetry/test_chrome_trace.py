"""The trace of a run: its steps, the Chrome format, and the time of a step by category."""

import json
from pathlib import Path

import pytest
import torch

from meshwright.engine.runtime.step_profiler import GLUE, ISSUE, WAIT, ProfilerSpan
from meshwright.plan.step.program import Action, Transfer
from meshwright.run.telemetry.chrome_trace import STEP_PARTS, LoopPhase, StepTracer, split_by_part, trace_path

CPU = torch.device("cpu")


def run(folder: Path, num_traced: int, first: int, last: int, ended: int | None = None) -> dict:
    """Steps `first` + 1 up to `ended` of a run up to `last`, each with one action; what the trace holds ({}:
    no file).
    """
    tracer = StepTracer(folder, 1, CPU, num_traced, first, last)
    for step in range(first + 1, (ended or last) + 1):
        watch = tracer.start_step(step)
        tracer.add_phase(step, LoopPhase("data", 1.0, 1.5))
        if watch is not None:
            with watch.record_span("STEP()", "STEP", Action("STEP")):
                pass
        tracer.add_phase(step, LoopPhase("step", 2.0, 3.0))
        tracer.end_step(step)
    tracer.write()
    path = trace_path(folder, 1)
    return json.loads(path.read_text()) if path.exists() else {}


def steps(document: dict) -> list[int]:
    return sorted({event["args"]["step"] for event in document.get("traceEvents", []) if event["ph"] == "X"})


@pytest.mark.parametrize(
    ("num_traced", "first", "last", "traced"),
    [
        (0, 0, 9, []),
        (2, 0, 9, [2, 3]),
        (3, 40, 60, [42, 43, 44]),
        (5, 0, 3, [2, 3]),
        (2, 0, 1, [1]),
        (2, 7, 7, []),
    ],
)
def test_steps_from_the_second_on_are_traced_and_a_lone_one(tmp_path, num_traced, first, last, traced):
    assert steps(run(tmp_path, num_traced, first, last)) == traced


def test_a_run_that_ends_early_leaves_what_it_has_traced(tmp_path):
    assert steps(run(tmp_path, 5, 0, 100, ended=3)) == [2, 3]


def test_a_trace_is_in_the_format_of_chrome(tmp_path):
    document = run(tmp_path, 2, 0, 9)
    names = {
        (event["name"], event["args"].get("name")) for event in document["traceEvents"] if event["ph"] == "M"
    }
    assert ("process_name", "rank 1") in names
    assert ("thread_name", "compute") in names
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            assert event["pid"] == 1
            assert event["ts"] > 1e15, "microseconds since the epoch"
            assert event["dur"] >= 0
            assert isinstance(event["tid"], int)
    data = [event for event in document["traceEvents"] if event["name"] == "data"]
    assert [event["dur"] for event in data] == [pytest.approx(5e5)] * 2
    assert [event["name"] for event in document["traceEvents"] if event.get("cat") == "step"] == [
        "step 2",
        "step 3",
    ]


def test_overlapping_messages_are_on_separate_tracks(tmp_path):
    tracer = StepTracer(tmp_path, 0, CPU, 1, 0, 1)
    watch = tracer.start_step(1)
    move = Transfer("all_reduce", ("dp_replicate",), 24, dtype="float64")
    for name in ("a", "b"):
        watch.begin_span(
            f"REDUCE({name})", "REDUCE", "comm", Action("REDUCE", name, stream="comm", transfer=move)
        )
    watch.end_comm_span("REDUCE(a)")
    watch.end_comm_span("REDUCE(b)")
    watch.begin_span("REDUCE(c)", "REDUCE", "comm", Action("REDUCE", "c", stream="comm", transfer=move))
    watch.end_comm_span("REDUCE(c)")
    tracer.end_step(1)
    events = json.loads(trace_path(tmp_path, 0).read_text())["traceEvents"]
    rows = {event["name"]: event["tid"] for event in events if event["ph"] == "X"}
    assert rows == {"REDUCE(a)": 2, "REDUCE(b)": 3, "REDUCE(c)": 2}
    said = next(event["args"] for event in events if event["name"] == "REDUCE(b)")
    assert (said["bytes"], said["collective"], said["subject"], said["axes"]) == (
        24,
        "all_reduce",
        "b",
        "dp_replicate",
    )


def test_copies_have_rows_of_their_stream(tmp_path: Path):
    tracer = StepTracer(tmp_path, 0, CPU, 1, 0, 1)
    watch = tracer.start_step(1)
    for name in ("a", "b"):
        watch.begin_span(f"EVICT({name})", "EVICT", "copy_out", Action("EVICT", name, stream="copy_out"))
    watch.begin_span("REDUCE(a)", "REDUCE", "comm", Action("REDUCE", "a", stream="comm"))
    for name in ("EVICT(a)", "EVICT(b)", "REDUCE(a)"):
        watch.end_comm_span(name)
    tracer.end_step(1)
    events = json.loads(trace_path(tmp_path, 0).read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = {event["name"]: names[event["tid"]] for event in events if event["ph"] == "X"}
    assert rows == {"EVICT(a)": "copy_out", "EVICT(b)": "copy_out (2)", "REDUCE(a)": "comm"}


def test_every_moment_of_a_step_counts_once():
    """Forward 0-4 with a block 1-2 and a wait 2-3 in it; loss 4-5, backward 5-7, pack 7-7.5, issue, optimizer
    8-9, of 0-10.
    """
    spans = [
        ProfilerSpan("forward(0)", GLUE, "compute", 0.0, 4.0),
        ProfilerSpan("F(a, 0)", "F", "compute", 1.0, 2.0),
        ProfilerSpan("wait TOKEN_COUNT()", WAIT, "compute", 2.0, 3.0),
        ProfilerSpan("TOKEN_COUNT()", "TOKEN_COUNT", "comm", 0.0, 9.5),
        ProfilerSpan("LOSS(0)", "LOSS", "compute", 4.0, 5.0),
        ProfilerSpan("B(a, 0)", "B", "compute", 5.0, 7.0),
        ProfilerSpan("PACK(a)", "PACK", "compute", 7.0, 7.5),
        ProfilerSpan("issue REDUCE(0)", ISSUE, "compute", 7.5, 7.75),
        ProfilerSpan("STEP()", "STEP", "compute", 8.0, 9.0),
    ]
    found = split_by_part(
        spans, [LoopPhase("data", -2.0, 0.0), LoopPhase("step", 0.0, 10.0), LoopPhase("save", 10.0, 13.0)]
    )
    assert found == {
        **{"data": 2.0, "forward": 3.0, "backward": 3.0, "exposed communication": 1.0, "optimizer": 1.0},
        **{"evaluate": 0.0, "save": 3.0, "other": 2.0},
    }
    assert tuple(found) == STEP_PARTS


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "trace").write_text("in the way")
    assert steps(run_without_reading(tmp_path)) == []
    assert "the trace cannot be written" in caplog.text


def run_without_reading(folder: Path) -> dict:
    tracer = StepTracer(folder, 1, CPU, 1, 0, 1)
    tracer.start_step(1)
    tracer.end_step(1)
    return {}
