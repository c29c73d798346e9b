"""Configurations that run in processes: their protocol and their failures.

Three ranks; no time is checked.
"""

import os
import signal

import pytest

from benchmarks.harness.rank_processes import InProcess, RankFailed, Ranks, Step


def build_counter(rank: int, size: int, *, first: int) -> Step:
    numbers = iter(range(first, 1000))
    return lambda: (rank, size, next(numbers))


def build_broken(rank: int, size: int) -> Step:
    raise OSError(f"rank {rank} found no store")


def build_failing(rank: int, size: int, *, failure: str) -> Step:
    def step() -> None:
        if rank == 1 and failure == "raise":
            raise ValueError("the loss is not a number")
        if rank == 1 and failure == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def test_a_step_of_this_process_returns_its_note():
    cost = InProcess("in process", lambda: 7).step()
    assert cost.notes == (7,)
    assert cost.cpu_s >= 0


def test_ranks_step_together_and_keep_their_state():
    with Ranks("counter", build_counter, 3, preload=(), first=5) as ranks:
        first, second = ranks.step(), ranks.step()
    assert first.notes == ((0, 3, 5), (1, 3, 5), (2, 3, 5))
    assert second.notes == ((0, 3, 6), (1, 3, 6), (2, 3, 6))
    assert not any(process.is_alive() for process in ranks.processes)
    assert [process.exitcode for process in ranks.processes] == [0, 0, 0]


def test_a_rank_that_cannot_be_built_is_named_with_its_traceback():
    with pytest.raises(
        RankFailed,
        match=r"(?s)rank \d of 3 of configuration 'broken' failed.*OSError: rank \d found no store",
    ):
        Ranks("broken", build_broken, 3, preload=())


def test_a_rank_that_raises_is_named_with_its_traceback():
    with (
        Ranks("failing", build_failing, 3, preload=(), failure="raise") as ranks,
        pytest.raises(RankFailed, match=r"(?s)rank 1 of 3 .*ValueError: the loss is not a number"),
    ):
        ranks.step()


def test_a_rank_that_dies_is_named_with_its_exit_status():
    with (
        Ranks("failing", build_failing, 3, preload=(), failure="die") as ranks,
        pytest.raises(RankFailed, match=r"rank 1 of 3 .* exit status -9"),
    ):
        ranks.step()
