"""Reading a run's folder: of a killed, a running or an incomplete run; other folders are refused."""

import json
from dataclasses import replace

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import METRICS, RANK_USAGE, RUN_INFO
from meshwright.report.timeline.run_folder_reader import plan_differences, read_run_record
from tests.paper_model import FIRST_ROLE
from tests.report.small_runs import train_small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return train_small_run(tmp_path_factory.mktemp("runs") / "one")


def test_a_whole_run_is_read_whole(folder):
    record = read_run_record(folder)
    assert record.name == "one"
    assert [line["step"] for line in record.steps] == [1, 2, 3, 4, 5, 6]
    assert (record.world, sorted(record.rank_accounts), sorted(record.traces)) == (3, [0, 1, 2], [0, 1, 2])
    assert record.program.actions(FIRST_ROLE)[0].kind == "TOKEN_COUNT"
    assert record.settings["strategies.ddp.bucket_mb"] == 25.0
    assert record.run_info["summary"]["mesh"] == "dp_replicate 3 (3 ranks)"
    assert record.notes == ()


def with_metrics(tmp_path, *lines: object):
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(METRICS.header) + "\n" + text)
    return read_run_record(tmp_path)


def test_of_several_lines_of_a_step_the_last_counts_and_other_kinds_are_separate(tmp_path):
    record = with_metrics(
        tmp_path,
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0},
        {"kind": "evaluation", "step": 2, "loss": 9.0},
        {"kind": "spike", "step": 2, "loss": 99.0},
        {"step": 2, "loss": 1.0},
    )
    assert [(line["step"], line["loss"]) for line in record.steps] == [(1, 3.0), (2, 1.0)]
    assert [line["loss"] for line in record.evaluations] == [9.0]


def test_a_line_that_is_still_being_written_is_left_out_and_so_is_a_damaged_one(tmp_path):
    record = with_metrics(
        tmp_path, {"step": 1, "loss": 3.0}, "\0\0\n", "[1]\n", {"step": 2, "loss": 2.0}, '{"step": 3, "lo'
    )
    assert [line["step"] for line in record.steps] == [1, 2]
    assert record.notes == (
        "line 3 of metrics.jsonl cannot be read, and was left out",
        "line 4 of metrics.jsonl cannot be read, and was left out",
        "the last line of metrics.jsonl is not whole yet, and was left out",
    )


def test_a_run_that_has_just_begun_has_no_steps(tmp_path):
    (tmp_path / "plan.toml").write_text('format = "meshwright plan"\nversion = 1\nmicro_batch = 2\n')
    record = read_run_record(tmp_path)
    assert record.steps == []
    assert record.notes == ("no step has ended yet",)


def test_files_that_cannot_be_read_are_noted(tmp_path):
    (tmp_path / "plan.toml").write_text("= broken")
    (tmp_path / "run_info.json").write_text(
        json.dumps(RUN_INFO.header | {"program": {"pp0": [{"no": "kind"}]}})
    )
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.json").write_text("{")
    record = with_metrics(tmp_path, {"step": 1, "loss": 3.0})
    assert set(record.notes) == {
        "plan.toml cannot be read, and was left out",
        "the program in run_info.json cannot be read, and was left out",
        "rank-0.json cannot be read, and was left out",
    }


def test_files_of_another_version_are_left_out_with_what_was_found(tmp_path):
    (tmp_path / "plan.toml").write_text('format = "meshwright plan"\nversion = 2\n')
    (tmp_path / "run_info.json").write_text(json.dumps({"world": 3}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**METRICS.header, "version": 7}) + "\n{}\n")
    record = read_run_record(tmp_path)
    assert (record.settings, record.run_info, record.steps) == ({}, {}, [])
    assert set(record.notes) == {
        "plan.toml was left out: its version is 2; this meshwright reads version 1 of it",
        "run_info.json was left out: it names no format and version; "
        "needed are 'meshwright run info', version 1",
        "metrics.jsonl was left out: its version is 7; this meshwright reads version 1 of it",
        "no step has ended yet",
    }


def test_files_of_ranks_that_the_run_no_longer_has_are_left_out(tmp_path):
    (tmp_path / "run_info.json").write_text(json.dumps(RUN_INFO.header | {"world": 1}))
    (tmp_path / "ranks").mkdir()
    for rank in (0, 1):
        (tmp_path / "ranks" / f"rank-{rank}.json").write_text(json.dumps(RANK_USAGE.header | {"rank": rank}))
    assert sorted(with_metrics(tmp_path, {"step": 1, "loss": 3.0}).rank_accounts) == [0]


def test_a_folder_that_is_no_run_is_refused(tmp_path, folder):
    with pytest.raises(PlanError, match=r"no run was here(?s:.*)name a run's folder"):
        read_run_record(tmp_path)
    with pytest.raises(PlanError, match=r"no run was here(?s:.*)name one of the runs in it: one"):
        read_run_record(folder.parent)
    with pytest.raises(PlanError, match="there is no such folder"):
        read_run_record(tmp_path / "absent")
    with pytest.raises(PlanError, match=rf"this is a file(?s:.*)try {folder}"):
        read_run_record(folder / "plan.toml")


def test_two_plans_differ_in_what_was_changed_and_not_in_their_folders(tmp_path, folder):
    other = train_small_run(tmp_path / "other", ranks=1, lr=0.5, trace_steps=0)
    found = dict(plan_differences([read_run_record(folder), read_run_record(other)]))
    assert found["optimizer.lr"] == ("0.01", "0.5")
    assert found["mesh.dp_replicate"] == ("3", "1")
    assert found["strategies.ddp.axis"] == ("dp_replicate", "(not set)")
    assert not {"run.folder", "plan_hash", "train.batch"} & set(found)
    assert plan_differences([read_run_record(folder), read_run_record(folder)]) == []


def test_a_key_in_which_one_of_three_plans_differs_is_listed_with_all_three_values(tmp_path):
    records = [
        replace(
            with_metrics(tmp_path, {"step": 1, "loss": 3.0}), settings={"optimizer.lr": lr, "train.seed": 0}
        )
        for lr in (0.1, 0.1, 0.2)
    ]
    assert plan_differences(records) == [("optimizer.lr", ("0.1", "0.1", "0.2"))]
