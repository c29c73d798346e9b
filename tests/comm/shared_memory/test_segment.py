"""A segment of shared memory, and detection of processes that have ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable
from meshwright.comm.shared_memory.segment import (
    DONE,
    MISMATCH,
    PENDING,
    SharedSegment,
    create_memory,
    open_memory,
)
from meshwright.comm.watchdog.process_identity import HostProcess

MOMENT_NS = 1_000_000
WORD = b"a word of 32 bytes, no one has.."


@pytest.fixture
def pair() -> tuple[SharedSegment, SharedSegment]:
    """Two ranks of one memory, both in this process."""
    fd = create_memory(2, WORD)
    other = open_memory(HostProcess.current(), fd, WORD)
    both = (
        SharedSegment(fd, [HostProcess.current()] * 2, 0, 0),
        SharedSegment(other, [HostProcess.current()] * 2, 1, 0),
    )
    os.close(fd)
    os.close(other)
    return both


def barrier(segment: SharedSegment, number: int, kind: int = 8) -> bool:
    return segment.post(number, kind, 1, 0, 0, 0, 0)


def test_an_operation_is_over_when_all_have_come(pair: tuple[SharedSegment, SharedSegment]) -> None:
    one, two = pair
    assert barrier(one, 0)
    assert one.finish(0, MOMENT_NS) == PENDING
    assert one.awaited_indices(0, for_place=False) == [1]
    assert barrier(two, 0)
    assert (one.finish(0, MOMENT_NS), two.finish(0, MOMENT_NS)) == (DONE, DONE)


def test_a_place_is_free_when_both_are_gone_from_it(pair: tuple[SharedSegment, SharedSegment]) -> None:
    one, two = pair
    for number in range(16):
        assert barrier(one, number)
        assert barrier(two, number)
    assert one.finish(0, MOMENT_NS) == DONE
    assert not barrier(one, 16)
    assert one.wait_for_place(16, MOMENT_NS) == PENDING
    assert one.awaited_indices(16, for_place=True) == [1]
    assert two.finish(0, MOMENT_NS) == DONE
    assert barrier(one, 16)


def test_what_each_has_said_can_be_read(pair: tuple[SharedSegment, SharedSegment]) -> None:
    one, two = pair
    barrier(one, 0)
    assert one.is_consistent(0)
    assert one.posted_call(0, 1) is None
    barrier(two, 0, kind=4)
    assert not one.is_consistent(0)
    assert (one.finish(0, MOMENT_NS), two.finish(0, MOMENT_NS)) == (MISMATCH, MISMATCH)
    assert one.posted_call(0, 0) == (8, 1, 0, 0)
    assert one.posted_call(0, 1) == (4, 1, 0, 0)


def test_a_rank_that_has_left_is_lost(pair: tuple[SharedSegment, SharedSegment]) -> None:
    one, two = pair
    assert one.lost_indices() == {}
    two.leave()
    assert one.lost_indices() == {1: "has left"}


def test_memory_with_another_magic_word_is_not_used(pair: tuple[SharedSegment, SharedSegment]) -> None:
    fd = create_memory(2, WORD)
    with pytest.raises(SharedMemoryUnavailable, match="is not the memory of this job"):
        open_memory(HostProcess.current(), fd, WORD[::-1])
    os.close(fd)
    with pytest.raises(SharedMemoryUnavailable, match="cannot be opened"):
        open_memory(HostProcess.current(), fd, WORD)


def test_something_that_is_no_memory_is_not_taken() -> None:
    read, write = os.pipe()
    with pytest.raises(SharedMemoryUnavailable, match="is not the memory of this job"):
        open_memory(HostProcess.current(), read, WORD)
    os.close(read)
    os.close(write)


def test_a_process_runs_until_it_ends_buried_or_not() -> None:
    own = HostProcess.current()
    assert own.is_running
    assert not HostProcess(own.pid, own.start_time + 1).is_running  # another one with the same number
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = HostProcess(
        child.pid, int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    )
    assert (seen.is_running, seen.is_stopped) == (True, False)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert (seen.is_running, seen.is_stopped) == (True, True)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not seen.is_running  # a corpse
    child.communicate()
    assert not seen.is_running
