"""Measurements from a run's folder: steps without the first, computation of the slowest rank, shortest time
of a message.
"""

import json
import os
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import RUN_INFO, TRACE
from meshwright.run.measure.previous_run import read_previous_run
from tests.run.measure.run_folders import COMPUTED_S, NBYTES, SENT_S, STEP_S, run_folder


def test_steps_and_where_they_went_are_read(tmp_path: Path):
    found = read_previous_run(run_folder(tmp_path / "run"))
    assert (found.device, found.num_steps) == ("Abacus 7", 20)
    assert found.step_s == pytest.approx(STEP_S)
    assert found.compute_s == pytest.approx(COMPUTED_S)
    assert [(each.collective, each.axes, each.nbytes) for each in found.collectives] == [
        ("all_reduce", ("dp_replicate",), NBYTES),
        ("all_reduce", ("dp_replicate",), 8),
    ]
    assert found.collectives[0].seconds == pytest.approx(SENT_S)


def test_a_run_without_a_trace_gives_step_times_only(tmp_path: Path):
    found = read_previous_run(run_folder(tmp_path / "run", traced=False, device="NVIDIA H100 80GB HBM3"))
    assert (found.compute_s, found.collectives) == (None, ())
    assert found.device == "NVIDIA H100 80GB HBM3"


def test_a_run_with_too_few_steps_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="9 steps beyond the first were timed; needed are 10") as raised:
        read_previous_run(run_folder(tmp_path / "run", steps=9))
    assert "--train.steps 12 or more" in raised.value.diagnostics[0].fix


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="there is no such folder"):
        read_previous_run(tmp_path / "none")
    with pytest.raises(PlanError, match=r"there is no run_info.json in it"):
        read_previous_run(tmp_path)
    folder = run_folder(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(PlanError, match=r"there is no metrics.jsonl in it: no step was timed"):
        read_previous_run(folder)
    (folder / "run_info.json").write_text("{")
    with pytest.raises(PlanError, match="the file cannot be read"):
        read_previous_run(folder)
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(PlanError, match=r"metrics\.jsonl: this is a named pipe; needed is a regular file"):
        read_previous_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "there is no machine"),
        ({"machine": {"device": "cpu"}}, "there is no processor"),
        ({"machine": "cpu"}, 'machine is "cpu"'),
    ],
)
def test_a_run_that_does_not_say_what_computed_is_refused(tmp_path: Path, content: dict, message: str):
    folder = run_folder(tmp_path / "run")
    (folder / "run_info.json").write_text(json.dumps(RUN_INFO.header | content))
    with pytest.raises(PlanError, match=r"run_info.json: it does not say which device computed: ") as raised:
        read_previous_run(folder)
    assert message in str(raised.value)
    assert "name a run of this version" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"seconds": 1.0}', "there is no data_s, there is no skipped"),
        ('{"seconds": "1", "data_s": 0, "skipped": false}', 'seconds is "1"'),
        ('{"seconds": 0.0, "data_s": 0.0, "skipped": false}', "0 seconds without the wait for data"),
        ('{"seconds": NaN, "data_s": 0.0, "skipped": false}', "nan seconds"),
        ("3", "3 is written where a table with seconds, data_s, skipped is needed"),
    ],
)
def test_a_line_that_no_journal_writes_is_named_by_its_number(tmp_path: Path, line: str, message: str):
    folder = run_folder(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:5], line, *lines[5:]]))
    with pytest.raises(PlanError, match="line 6 is not a step record of `train`: ") as raised:
        read_previous_run(folder)
    assert message in str(raised.value)
    assert "remove the line, or name another run" in str(raised.value)


PARTS = dict.fromkeys(("forward", "backward", "optimizer", "other"), 0.1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"traceEvents": []}, "there is no otherData"),
        (
            {"traceEvents": [], "otherData": {"seconds": {}}},
            "seconds of no step are in it, and needed are those of one",
        ),
        (
            {"traceEvents": [], "otherData": {"seconds": {"2": {"forward": 1}}}},
            "of step 2 there is no backward",
        ),
        (
            {"traceEvents": [3], "otherData": {"seconds": {"2": PARTS}}},
            "of event 0 3 is written where a table is needed",
        ),
        (
            {
                "traceEvents": [{"args": {"collective": "all_reduce", "step": 2}}],
                "otherData": {"seconds": {"2": PARTS}},
            },
            "of event 0 there is no axes, there is no bytes",
        ),
    ],
)
def test_a_trace_that_is_damaged_is_named_and_may_be_left_away(tmp_path: Path, content: dict, message: str):
    folder = run_folder(tmp_path / "run")
    (folder / "trace" / "rank-0.json").write_text(json.dumps(TRACE.header | content))
    with pytest.raises(PlanError, match=r"rank-0.json: no trace as `train` writes it: ") as raised:
        read_previous_run(folder)
    assert message in str(raised.value)
    assert "or remove the folder trace" in str(raised.value)


def test_all_that_is_damaged_in_a_run_is_told_at_once(tmp_path: Path):
    folder = run_folder(tmp_path / "run")
    (folder / "run_info.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "trace" / "rank-1.json").write_text("{")
    with pytest.raises(PlanError) as raised:
        read_previous_run(folder)
    assert [Path(fault.location).name for fault in raised.value.diagnostics] == [
        "run_info.json",
        "metrics.jsonl",
        "rank-1.json",
    ]
