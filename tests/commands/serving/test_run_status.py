"""What a run does, told by its folder: it trains, waits, has failed, was stopped, has ended."""

import json
import os
import time
from pathlib import Path

import pytest

from meshwright.commands.serving.run_status import RunStatus, files_version, run_status
from meshwright.report.timeline.run_folder_reader import read_run_record
from meshwright.run.launch.failure_record import FailureRecord
from meshwright.run.launch.run_folder import (
    OWNER_FILE,
    claim_run_folder,
    is_running,
    newest_attempt,
)
from tests.report.small_runs import train_small_run

STEPS = 6


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that is to take twice as many steps as it has taken."""
    folder = train_small_run(tmp_path / "run", steps=STEPS)
    plan = folder / "plan.toml"
    plan.write_text(plan.read_text().replace(f"steps = {STEPS}\n", f"steps = {2 * STEPS}\n"))
    return folder


def status(folder: Path) -> RunStatus:
    return run_status(folder, read_run_record(folder))


def age(path: Path, seconds: float) -> None:
    """Makes `path` look as if nothing had been written for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def fail(folder: Path, rank: int, kind: str, at: float, message: str = "no token came") -> None:
    attempt = newest_attempt(folder)
    assert attempt is not None
    FailureRecord(rank, at, kind, "ValueError", message, f"Traceback of {message}", 5, "training").write(
        attempt.folder
    )


def test_a_run_trains_while_its_owner_lives_and_waits_when_no_step_ends(folder):
    with claim_run_folder(folder):
        assert (status(folder).state, status(folder).text) == ("training", "step 6 of 12")
        age(folder / "metrics.jsonl", 300)
        late = status(folder)
        assert late.state == "waiting"
        assert "no step has ended for 300 s" in late.text
    assert status(folder).state == "stopped"
    assert "step 6 of 12" in status(folder).text


def test_a_run_has_ended_after_its_last_step(tmp_path):
    folder = train_small_run(tmp_path / "run", steps=STEPS)
    with claim_run_folder(folder):
        pass
    assert (status(folder).state, status(folder).text) == ("ended", "ended after step 6 of 6")


@pytest.mark.parametrize(
    ("failures", "shown"),
    [
        ([(0, "lost_peer", 1.0), (1, "error", 2.0), (2, "hang", 0.5)], 1),
        ([(0, "lost_peer", 1.0), (2, "hang", 3.0)], 2),
        ([(2, "error", 3.0), (1, "error", 2.0)], 1),
    ],
)
def test_the_failure_that_is_no_consequence_is_shown(folder, failures, shown):
    with claim_run_folder(folder):
        for rank, kind, at in failures:
            fail(folder, rank, kind, at)
    found = status(folder)
    assert found.state == "failed"
    assert f"rank {shown} " in found.text
    assert "no token came" in found.failure


def test_a_resumed_run_shows_no_failure_of_an_earlier_attempt(folder):
    with claim_run_folder(folder):
        fail(folder, 0, "error", 1.0)
    with claim_run_folder(folder):
        assert status(folder).state == "training"


def test_a_damaged_record_of_a_failure_is_left_out(folder):
    with claim_run_folder(folder) as attempt:
        fail(folder, 0, "error", 1.0)
        (attempt.folder / "failures" / "rank-0.json").write_text('{"rank": 0}')
    assert status(folder).state == "stopped"


def test_a_run_of_another_launcher_is_known_by_its_steps(folder):
    assert newest_attempt(folder) is None
    assert status(folder).state == "training"
    age(folder / "metrics.jsonl", 300)
    assert status(folder).state == "stopped"


def test_an_owner_on_another_host_lives_while_it_renews_its_claim(folder):
    with claim_run_folder(folder) as attempt:
        path = attempt.folder / OWNER_FILE
        said = json.loads(path.read_text())
        path.write_text(json.dumps(said | {"host_id": "elsewhere"}))
        assert is_running(attempt)
        age(path, 300)
        assert not is_running(attempt)


def test_the_version_of_files_changes_with_what_pages_show(folder):
    first = files_version([folder])
    assert files_version([folder]) == first
    (folder / "other.txt").write_text("not shown")
    assert files_version([folder]) == first
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert files_version([folder]) != first
