"""Claims of a run's folder: one holder at a time, dead owners on this and on other hosts, pipes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import RUN_OWNER
from meshwright.run.launch import run_folder
from meshwright.run.launch.run_folder import Attempt, Owner, claim_run_folder
from tests.run.launch.rank_scripts import ENV

HOLDER = """
import sys, time
from pathlib import Path
from meshwright.run.launch import run_folder

run_folder.RENEW_S = 0.02
with run_folder.claim_run_folder(Path(sys.argv[1])) as attempt:
    print(attempt.number, flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that holds `folder`."""
    argv = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(argv, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        yield process
    finally:
        process.kill()
        process.communicate()


def write_owner(folder: Path, owner: Owner, number: int = 1) -> Path:
    """Leaves the claim of `owner` in `folder`."""
    path = Attempt(folder, number).folder / "owner.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(RUN_OWNER.header | asdict(owner)))
    return path


def test_a_folder_that_is_held_is_refused_with_its_owner_its_start_and_the_repair(tmp_path):
    with (
        claim_run_folder(tmp_path) as attempt,
        pytest.raises(PlanError) as refused,
        claim_run_folder(tmp_path),
    ):
        pytest.fail("the folder was claimed twice")
    assert attempt == Attempt(tmp_path, 1)
    (diagnostic,) = refused.value.diagnostics
    owner = f"process {os.getpid()} on host {socket.gethostname()}"
    assert re.match(
        rf"another run trains in this folder: attempt 1, {re.escape(owner)}, since \d{{4}}-\d\d-\d\d \d\d:",
        diagnostic.problem,
    )
    assert f"kill {os.getpid()} on host" in diagnostic.fix
    assert "--run.folder" in diagnostic.fix
    assert diagnostic.location == str(tmp_path)


def test_a_folder_is_free_when_a_claim_has_ended_and_its_number_is_not_given_again(tmp_path):
    for number in (1, 2, 3):
        with claim_run_folder(tmp_path / "run") as attempt:
            assert attempt.number == number
            assert (attempt.folder / "owner.json").is_file()
    assert sorted(path.name for path in (tmp_path / "run" / "attempts").iterdir()) == ["0001", "0002", "0003"]
    assert [path.name for path in attempt.folder.iterdir()] == ["former_owner.json"]


def test_a_claim_ends_with_an_error_of_the_body(tmp_path):
    with pytest.raises(KeyError), claim_run_folder(tmp_path):
        raise KeyError
    with claim_run_folder(tmp_path) as attempt:
        assert attempt.number == 2


def test_the_claim_of_a_killed_process_is_taken_over(tmp_path):
    with holder(tmp_path) as process:
        with (
            pytest.raises(PlanError, match=f"attempt 1, process {process.pid} on"),
            claim_run_folder(tmp_path),
        ):
            pytest.fail("its owner is alive")
        process.kill()
        process.wait()
        with claim_run_folder(tmp_path) as attempt:
            assert attempt.number == 2
        assert (tmp_path / "attempts" / "0001" / "former_owner.json").is_file()


def test_a_stopped_process_of_this_host_keeps_its_claim(tmp_path):
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PlanError, match="another run trains"), claim_run_folder(tmp_path):
            pytest.fail("its owner may go on")


def test_a_process_that_got_the_pid_of_a_dead_owner_is_not_taken_for_it(tmp_path):
    mine = Owner.current()
    write_owner(tmp_path, replace(mine, start_time=mine.start_time - 1))
    with claim_run_folder(tmp_path) as attempt:
        assert attempt.number == 2


def test_an_owner_on_another_host_is_alive_while_it_renews_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "POLL_S", 0.01)
    path = write_owner(tmp_path, replace(Owner.current(), host="far", host_id="far", pid=7))
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.01):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with (
            pytest.raises(PlanError, match=r"process 7 on host far.*\n.*kill 7 on host far"),
            claim_run_folder(tmp_path),
        ):
            pytest.fail("its owner is alive")
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"host": "far"}', json.dumps(asdict(Owner("far", "f", 7, 1, 0.0)))]
)
def test_a_silent_owner_on_another_host_or_of_unknown_name_is_dead(text, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "POLL_S", 0.01)
    monkeypatch.setattr(run_folder, "SILENT_S", 0.05)
    path = write_owner(tmp_path, Owner.current())
    path.write_text(text)
    with claim_run_folder(tmp_path) as attempt:
        assert attempt.number == 2


def test_an_owner_whose_claim_was_taken_over_ends(tmp_path):
    with holder(tmp_path) as process:
        path = tmp_path / "attempts" / "0001" / "owner.json"
        path.rename(path.with_name("former_owner.json"))
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "another run took over" in err


def test_of_threads_that_claim_at_once_never_two_hold_the_folder(tmp_path):
    holding: list[int] = []
    most: list[int] = []
    refused: list[str] = []

    def claim_often() -> None:
        for _ in range(10):
            try:
                with claim_run_folder(tmp_path):
                    holding.append(1)
                    most.append(len(holding))
                    time.sleep(0.001)
                    holding.pop()
            except PlanError as error:
                refused.append(error.diagnostics[0].problem)

    threads = [threading.Thread(target=claim_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert refused
    assert all("another run trains in this folder" in text for text in refused)


def test_a_slow_claim_of_a_number_that_was_given_meanwhile_looks_at_the_newest_attempt(tmp_path, monkeypatch):
    write_owner(tmp_path, Owner.current(), number=2)
    write_owner(tmp_path, Owner.current(), number=1).rename(tmp_path / "attempts/0001/former_owner.json")
    usual, first = run_folder._attempt_numbers, iter([[]])
    monkeypatch.setattr(run_folder, "_attempt_numbers", lambda folder: next(first, usual(folder)))
    with pytest.raises(PlanError, match="attempt 2, process"), claim_run_folder(tmp_path):
        pytest.fail("attempt 2 holds the folder")
    assert sorted(path.name for path in (tmp_path / "attempts").iterdir()) == ["0001", "0002"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "plan.toml", "logs/rank-1.log", "checkpoints/best.json", "ranks/rank-0.json"]
)
def test_a_pipe_in_place_of_a_file_of_the_run_is_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with (
        pytest.raises(PlanError, match=rf"{name}: this is a named pipe; needed is a regular file\n.*move it"),
        claim_run_folder(tmp_path),
    ):
        pytest.fail("opening it would wait for ever")
    assert not (tmp_path / "attempts").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(PlanError, match=r"cannot be made: Not a directory\n.*can be written to"),
        claim_run_folder(tmp_path / "file" / "run"),
    ):
        pytest.fail("there is no folder")
