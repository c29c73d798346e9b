"""The metrics log of a run: repeated steps are compared with it, and a truncated last line is removed."""

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import METRICS
from meshwright.run.telemetry.metrics_log import MetricsLog, read_metrics


def line(step: int, loss: float = 0.5, **others: object) -> dict:
    return {"step": step, "loss": loss, "grad_norm": 1.0, "tokens": 64, "seconds": 0.1, **others}


def written(folder: Path, *lines: dict) -> str:
    """Returns what playing `lines` says about replays."""
    journal = MetricsLog(folder)
    for each in lines:
        journal.write(each)
    journal.close()
    return str(journal.replay)


def steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / "metrics.jsonl")]


def test_new_steps_are_appended_and_nothing_is_said(tmp_path):
    assert written(tmp_path / "run", line(1), line(2)) == ""
    assert written(tmp_path / "run", line(3)) == ""
    assert steps(tmp_path / "run") == [1, 2, 3]


def test_steps_that_come_out_the_same_are_not_written_twice(tmp_path):
    written(tmp_path, line(1), line(2), line(3))
    said = written(tmp_path, line(2, seconds=9.0), line(3), line(4))
    assert said == "2 steps were repeated from step 2: all are bit-identical"
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert written(tmp_path, line(4)) == "step 4 was repeated and is bit-identical"


@pytest.mark.parametrize("key", ["loss", "grad_norm", "tokens"])
def test_the_first_step_that_differs_is_named_and_the_new_lines_count(tmp_path, key):
    written(tmp_path, line(1), line(2), line(3), line(4))
    other = math.nextafter(line(2)[key], 9)
    said = written(tmp_path, line(2), line(3, **{key: other}), line(4, **{key: other}))
    assert said == f"step 3 was repeated and differs: {key} {line(2)[key]!r} then, {other!r} now"
    assert steps(tmp_path) == [1, 2, 3, 4, 3, 4]
    assert "all are" in written(tmp_path, line(3, **{key: other}), line(4, **{key: other}))


def test_metrics_of_other_tasks_are_appended_and_only_those_of_the_same_are_compared(tmp_path):
    def differs(*lines: dict) -> bool:
        journal = MetricsLog(tmp_path)
        for each in lines:
            journal.write(each)
        journal.close()
        return journal.replay.first_difference is not None

    first, other = ({"kind": "tasks", "step": 2, f"eval/{name}/acc": 0.5} for name in ("one", "two"))
    assert not differs(first)
    assert not differs(other)
    assert not differs({**first, "seconds": 3.0}, other)
    assert steps(tmp_path) == [2, 2]
    assert differs({**first, "eval/one/acc": 0.75})
    assert steps(tmp_path) == [2, 2, 2]


def test_a_step_that_was_nan_and_is_nan_is_the_same(tmp_path):
    written(tmp_path, line(1, math.nan))
    assert "bit-identical" in written(tmp_path, line(1, math.nan))


def test_an_evaluation_has_a_line_of_its_own_and_is_held_against_its_first(tmp_path):
    first = {"kind": "evaluation", "step": 2, "loss": 0.4, "perplexity": 1.5, "tokens": 64}
    written(tmp_path, line(1), line(2), first, line(3))
    assert written(tmp_path, line(2), first, line(3)).startswith("2 steps were repeated from step 2: all are")
    assert steps(tmp_path) == [1, 2, 2, 3]
    said = written(tmp_path, line(2), {**first, "loss": 0.5})
    assert said == "the evaluation at step 2 was repeated and differs: loss 0.4 then, 0.5 now"
    assert steps(tmp_path) == [1, 2, 2, 3, 2]


@pytest.mark.parametrize("cut", [1, 20, 70])
def test_a_line_that_a_kill_cut_short_is_removed(tmp_path, cut):
    written(tmp_path, line(1), line(2))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    written(tmp_path, line(2), line(3))
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({**METRICS.header, "version": 2}, "its version is 2; this meshwright reads version 1"),
        ({**METRICS.header, "format": "other"}, "its format is 'other'; needed is 'meshwright metrics'"),
        (line(1), "it names no format and version; needed are 'meshwright metrics', version 1"),
    ],
)
def test_a_file_of_another_version_is_refused_and_not_appended_to(tmp_path, header, problem):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(PlanError) as caught:
        MetricsLog(tmp_path)
    (fault,) = caught.value.diagnostics
    assert (fault.location, fault.problem[: len(problem)]) == (f"{path}:1", problem)
    assert "move the file away" in fault.fix
    assert path.read_text() == json.dumps(header) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"step": 2}',
        '{"step": 2, "kind": "odd"}',
        '{"step": 2, "kind": "evaluation"}',
        "\x00\x00",
        "NaN",
    ],
)
def test_a_whole_line_of_something_else_is_refused_with_its_place(tmp_path, text):
    written(tmp_path, line(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(text + "\n")
    with pytest.raises(PlanError) as caught:
        MetricsLog(tmp_path)
    (fault,) = caught.value.diagnostics
    assert fault.location == f"{tmp_path / 'metrics.jsonl'}:3"
    assert "is not one of metrics" in fault.problem
    assert "remove the line" in fault.fix


def test_a_full_disk_is_told_with_its_repair_and_the_file_can_be_closed(tmp_path, monkeypatch):
    journal = MetricsLog(tmp_path)
    journal.close()
    with suppress(OSError), Path("/dev/full").open("a", encoding="ascii") as full:
        monkeypatch.setattr(journal, "_file", full)
        with pytest.raises(
            PlanError, match=r"(?s)the metrics cannot be written: No space left.*continues from"
        ):
            journal.write(line(1))
        journal.close()
        assert full.closed
