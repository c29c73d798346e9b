"""A comm thread runs works in order, by itself or by a waiting thread, and keeps errors for those who
wait.
"""

from collections.abc import Iterator
from threading import Event, current_thread

import pytest

from meshwright.comm.backends.comm_thread import CommThread


@pytest.fixture
def comm_thread() -> Iterator[CommThread]:
    comm_thread = CommThread("under test")
    yield comm_thread
    comm_thread.close()


def blocked_work(comm_thread: CommThread) -> tuple[Event, Event]:
    """A work that the lane's thread has begun, and which lasts until the second event is set."""
    begun, go_on = Event(), Event()

    def hold() -> None:
        begun.set()
        go_on.wait(30)

    comm_thread.submit(hold)
    assert begun.wait(30)
    return begun, go_on


def test_works_run_in_the_order_of_submission(comm_thread: CommThread):
    played: list[int] = []
    works = [comm_thread.submit(lambda number=number: played.append(number)) for number in range(100)]
    for work in reversed(works):
        work.wait()
    assert played == list(range(100))


def test_works_without_a_waiter_run_on_the_comm_thread(comm_thread: CommThread):
    names: list[str] = []
    over = Event()
    comm_thread.submit(lambda: names.append(current_thread().name)).add_done_callback(over.set)
    assert over.wait(30)
    assert names == ["under test"]


def test_a_wait_returns_when_another_thread_has_run_the_work(comm_thread: CommThread):
    played: list[int] = []
    _, go_on = blocked_work(comm_thread)
    work = comm_thread.submit(lambda: played.append(1))
    work.add_done_callback(lambda: played.append(2))
    go_on.set()
    work.wait()
    work.wait()
    assert played == [1, 2]


def test_works_after_an_awaited_work_run_too(comm_thread: CommThread):
    over = Event()
    first, second = comm_thread.submit(lambda: None), comm_thread.submit(lambda: None)
    second.add_done_callback(over.set)
    first.wait()
    assert over.wait(30)


def test_an_error_is_raised_by_every_wait_and_later_works_run(comm_thread: CommThread):
    def fail() -> None:
        raise KeyError("planted")

    played: list[int] = []
    bad, good = comm_thread.submit(fail), comm_thread.submit(lambda: played.append(1))
    good.wait()
    for _ in range(2):
        with pytest.raises(KeyError, match="planted"):
            bad.wait()
    assert played == [1]


def test_an_error_of_a_callback_reaches_every_waiter_and_the_thread_continues(comm_thread: CommThread):
    def fail() -> None:
        raise KeyError("in what follows")

    _, go_on = blocked_work(comm_thread)
    work, over = comm_thread.submit(lambda: None), Event()
    work.add_done_callback(fail)
    comm_thread.submit(lambda: None).add_done_callback(over.set)
    go_on.set()
    assert over.wait(30)
    with pytest.raises(KeyError, match="in what follows"):
        work.wait()


def test_works_not_run_before_the_thread_closed_raise():
    comm_thread = CommThread("closed")
    _, go_on = blocked_work(comm_thread)
    work = comm_thread.submit(lambda: None)
    comm_thread.close()
    go_on.set()
    with pytest.raises(
        RuntimeError, match=r"closed before this collective had run\. Wait for a collective before the world"
    ):
        work.wait()
