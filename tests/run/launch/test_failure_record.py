"""Failure records of ranks: kind, cause and round trip."""

import json
import os

import pytest

from meshwright.plan.job.errors import CollectiveError, PlanError
from meshwright.run.launch.failure_record import (
    FailureRecord,
    RankProgress,
    failure_kind,
    failure_path,
    read_failures,
    record_failure,
)


class DistError(RuntimeError):
    """Stands for torch's class of the same name, the base of DistBackendError and its kin."""


class DistBackendError(DistError):
    """The exception that NCCL's failures are raised as."""


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "error"),
        (RuntimeError("shape mismatch"), "error"),
        (TimeoutError("timed out"), "error"),
        (ConnectionResetError("Connection reset by peer"), "error"),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"), "lost_peer"),
        (
            RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete"),
            "lost_peer",
        ),
        (RuntimeError("Application timeout caused pair closure"), "lost_peer"),
        (DistBackendError("NCCL error: remote process exited"), "lost_peer"),
        (chained(ValueError("reduce of layer 3"), DistBackendError("x")), "lost_peer"),
        (chained(RuntimeError("Connection closed by peer"), ValueError("x")), "lost_peer"),
        (PlanError("x", fix="y"), "plan_error"),
        (CollectiveError("x", report="rank 1 did not join"), "hang"),
        (chained(ValueError("x"), CollectiveError("x", report="rank 1 did not join")), "hang"),
        (CollectiveError("no report"), "error"),
    ],
)
def test_a_failure_is_of_its_kind(error, kind):
    assert failure_kind(error) == kind


def test_a_body_that_ends_well_leaves_nothing_behind(tmp_path):
    with record_failure(0, tmp_path) as progress:
        progress.step = 1
    assert list(tmp_path.iterdir()) == []


def test_leaving_with_an_exit_code_is_not_a_failure(tmp_path):
    with pytest.raises(SystemExit), record_failure(0, tmp_path):
        raise SystemExit(143)
    assert list(tmp_path.iterdir()) == []


def fail(progress: RankProgress) -> None:
    progress.step, progress.phase = 3, "forward"
    try:
        raise KeyError("weight")
    except KeyError as error:
        raise ValueError("\u00fcber") from error


def test_a_record_contains_the_whole_chain_of_causes(tmp_path, monkeypatch):
    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit) as caught, record_failure(2, tmp_path) as progress:
        fail(progress)
    assert caught.value.code == 1
    (record,) = read_failures(tmp_path).values()
    assert (record.rank, record.kind, record.type, record.message) == (2, "error", "ValueError", "\u00fcber")
    assert (record.step, record.phase) == (3, "forward")
    assert "KeyError: 'weight'" in record.traceback
    assert json.loads(failure_path(tmp_path, 2).read_text())["rank"] == 2


def test_a_record_is_read_back(tmp_path):
    record = FailureRecord(1, 2.5, "lost_peer", "RuntimeError", "m", "t", 4, "save")
    record.write(tmp_path)
    assert read_failures(tmp_path) == {1: record}
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["rank-1.json"]
