"""A fork has the session, signals, output and exit code of a new interpreter."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.run.launch.forked_process import ForkedProcess


def fork(main: Callable[[], object], output: Path) -> ForkedProcess:
    with output.open("ab") as file:
        return ForkedProcess(main, file.fileno(), ())


@pytest.mark.parametrize(
    ("main", "code"),
    [
        (lambda: None, 0),
        (lambda: sys.exit(2), 2),
        (lambda: sys.exit("why"), 1),
        (lambda: 1 / 0, 1),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    ],
    ids=["ends", "exits with a code", "exits with a text", "raises", "is killed"],
)
def test_its_exit_code_is_that_of_an_interpreter(tmp_path: Path, main: Callable[[], object], code: int):
    process = fork(main, tmp_path / "log")
    assert process.wait() == code
    assert (process.poll(), process.returncode) == (code, code)
    process.send_signal(signal.SIGKILL)  # it has ended: nothing is sent


def test_it_has_its_own_session_output_and_signals(tmp_path: Path):
    def main() -> None:
        found = os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGTERM)
        os.write(1, f"{found}{sys.stdin.read()}".encode())
        os._exit(7)

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        process = fork(main, tmp_path / "log")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert process.wait() == 7
    assert (tmp_path / "log").read_text() == str((True, signal.SIG_DFL))


def test_a_signal_that_arrives_before_it_runs_is_its_own(tmp_path: Path):
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        process = fork(lambda: time.sleep(600), tmp_path / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not noted


def test_descriptors_to_close_are_closed_in_the_fork_alone(tmp_path: Path):
    read_fd, write_fd = os.pipe()
    with (tmp_path / "log").open("ab") as file:
        process = ForkedProcess(lambda: os.read(read_fd, 1), file.fileno(), (write_fd,))
    os.close(write_fd)
    assert process.wait() == 0  # else it would wait for what it could write itself
    os.close(read_fd)
