"""Signals to the local launcher: saving, stopping, and killing of ranks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.run.launch.local_launcher import LaunchResult, LaunchTimeouts
from tests.run.launch.rank_scripts import WORLD, Job, is_running


@pytest.fixture(params=["interpreters", "forks"])
def start_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(body: str, limits: LaunchTimeouts | None = None) -> Job:
        started.append(Job(tmp_path, request.param, body, limits))
        return started[-1]

    yield start
    for job in started:
        job.close()


def test_ranks_end_when_their_parent_is_killed(tmp_path, start_job):
    body = """
on_term(lambda: None)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
meet(helper.pid)
for_ever()
"""
    job = start_job(body)
    os.kill(job.process.pid, signal.SIGKILL)
    while any(is_running(pid) for pid in job.pids):
        time.sleep(0.01)  # see assert_all_ended
    assert job.process.wait() == -signal.SIGKILL


SAVES = """
told = []
on_term(lambda: told.append(1))
meet()
while not told:
    time.sleep(0.01)
time.sleep(0.1)
say("saved", len(told))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_parent_lets_every_rank_save_and_reaches_it_once(tmp_path, start_job, number, code):
    job = start_job(SAVES)
    job.send(number)
    assert job.outcome() == LaunchResult(code)
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(WORLD)] == ["1", "1", "1"]


STUBBORN = """
on_term(lambda: say("told"))
meet()
for_ever()
"""


def test_a_second_interrupt_ends_everything_at_once(tmp_path, start_job):
    job = start_job(STUBBORN, LaunchTimeouts(interrupt_s=1e6))
    job.send(signal.SIGINT)
    job.wait_for("told")
    assert all(is_running(pid) for pid in job.pids)
    job.send(signal.SIGINT)
    assert job.outcome() == LaunchResult(130, None, (0, 1, 2))


@pytest.mark.parametrize(
    ("number", "limits", "code"),
    [
        (signal.SIGTERM, LaunchTimeouts(terminate_s=0.3, interrupt_s=1e6), 143),
        (signal.SIGINT, LaunchTimeouts(terminate_s=1e6, interrupt_s=0.3), 130),
    ],
)
def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path, start_job, number, limits, code):
    job = start_job(STUBBORN, limits)
    job.send(number)
    assert job.outcome() == LaunchResult(code, None, (0, 1, 2))


def test_ranks_that_know_no_signal_simply_end(tmp_path, start_job):
    job = start_job("meet()\nfor_ever()")
    job.send(signal.SIGTERM)
    assert job.outcome() == LaunchResult(143)


def test_a_save_that_fails_is_a_failure_and_the_others_are_not_waited_for(tmp_path, start_job):
    body = """
def save():
    if rank == 1:
        raise OSError(28, "No space left on device")
on_term(save)
meet()
for_ever()
"""
    job = start_job(body, LaunchTimeouts(terminate_s=1e6))
    job.send(signal.SIGTERM)
    outcome = job.outcome()
    assert (outcome.exit_code, outcome.failure.rank, outcome.killed_ranks) == (1, 1, (0, 2))
    assert "No space left on device" in outcome.failure.text


def test_a_broken_connection_while_stopping_is_no_failure(tmp_path, start_job):
    body = """
def part():
    if rank == 1:
        os._exit(0)
    until("here-1")
    raise RuntimeError("Connection closed by peer")
on_term(part)
meet()
for_ever()
"""
    job = start_job(body)
    job.send(signal.SIGTERM)
    assert job.outcome() == LaunchResult(143)
