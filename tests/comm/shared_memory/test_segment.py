"""One piece of shared memory, and whose process still runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.comm.shared_memory.build import Unavailable
from meshwright.comm.shared_memory.segment import DISAGREE, DONE, NOT_YET, Segment, memory, opened
from meshwright.comm.watchdog.host import Process

MOMENT_NS = 1_000_000
WORD = b"a word of 32 bytes, no one has.."


@pytest.fixture
def pair() -> tuple[Segment, Segment]:
    """Two ranks of one memory, both in this process."""
    fd = memory(2, WORD)
    other = opened(Process.own(), fd, WORD)
    both = Segment(fd, [Process.own()] * 2, 0, 0), Segment(other, [Process.own()] * 2, 1, 0)
    os.close(fd)
    os.close(other)
    return both


def barrier(segment: Segment, number: int, kind: int = 8) -> bool:
    return segment.post(number, kind, 1, 0, 0, 0, 0)


def test_an_operation_is_over_when_all_have_come(pair: tuple[Segment, Segment]) -> None:
    one, two = pair
    assert barrier(one, 0)
    assert one.finish(0, MOMENT_NS) == NOT_YET
    assert one.awaited(0, for_room=False) == [1]
    assert barrier(two, 0)
    assert (one.finish(0, MOMENT_NS), two.finish(0, MOMENT_NS)) == (DONE, DONE)


def test_a_place_is_free_when_both_are_gone_from_it(pair: tuple[Segment, Segment]) -> None:
    one, two = pair
    for number in range(16):
        assert barrier(one, number)
        assert barrier(two, number)
    assert one.finish(0, MOMENT_NS) == DONE
    assert not barrier(one, 16)
    assert one.room(16, MOMENT_NS) == NOT_YET
    assert one.awaited(16, for_room=True) == [1]
    assert two.finish(0, MOMENT_NS) == DONE
    assert barrier(one, 16)


def test_what_each_has_said_can_be_read(pair: tuple[Segment, Segment]) -> None:
    one, two = pair
    barrier(one, 0)
    assert one.agree(0)
    assert one.said(0, 1) is None
    barrier(two, 0, kind=4)
    assert not one.agree(0)
    assert (one.finish(0, MOMENT_NS), two.finish(0, MOMENT_NS)) == (DISAGREE, DISAGREE)
    assert one.said(0, 0) == (8, 1, 0, 0)
    assert one.said(0, 1) == (4, 1, 0, 0)


def test_a_rank_that_has_left_is_lost(pair: tuple[Segment, Segment]) -> None:
    one, two = pair
    assert one.lost() == {}
    two.leave()
    assert one.lost() == {1: "has left"}


def test_memory_with_another_word_is_not_taken(pair: tuple[Segment, Segment]) -> None:
    fd = memory(2, WORD)
    with pytest.raises(Unavailable, match="is not the memory of this job"):
        opened(Process.own(), fd, WORD[::-1])
    os.close(fd)
    with pytest.raises(Unavailable, match="cannot be opened"):
        opened(Process.own(), fd, WORD)


def test_something_that_is_no_memory_is_not_taken() -> None:
    read, write = os.pipe()
    with pytest.raises(Unavailable, match="is not the memory of this job"):
        opened(Process.own(), read, WORD)
    os.close(read)
    os.close(write)


def test_a_process_runs_until_it_ends_buried_or_not() -> None:
    own = Process.own()
    assert own.runs
    assert not Process(own.number, own.started + 1).runs  # another one with the same number
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = Process(child.pid, int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]))
    assert (seen.runs, seen.stopped) == (True, False)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert (seen.runs, seen.stopped) == (True, True)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not seen.runs  # a corpse
    child.communicate()
    assert not seen.runs
