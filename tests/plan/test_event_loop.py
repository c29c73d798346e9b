"""The event loop: who is woken when, with and without order of time, and what is left in a deadlock."""

from meshwright.plan.event_loop import EventLoop

Wakes = list[tuple[int, float]]


def wakes(loop: EventLoop[str], first: dict[int, list[tuple[str, float]]], needs: dict[int, str]) -> Wakes:
    """The calls of a run in which each worker makes its `first` events once it has what it `needs`."""
    found: Wakes = []

    def wake(worker: int, time: float) -> None:
        found.append((worker, time))
        if worker not in needs or loop.arrival([needs[worker]], worker) is not None:
            for event, at in first.pop(worker, ()):
                loop.happen(event, at, worker)

    loop.run(wake)
    return found


def test_every_worker_is_woken_once_at_time_zero():
    assert sorted(wakes(EventLoop(3), {}, {})) == [(0, 0.0), (1, 0.0), (2, 0.0)]


def test_an_event_wakes_another_worker_after_the_delay():
    loop = EventLoop[str](2, delay=0.5, by_time=True)
    found = wakes(loop, {1: [("F0", 2.0)]}, {0: "F0"})
    assert found == [(0, 0.0), (1, 0.0), (0, 2.5)]
    assert (loop.arrival(["F0"], 0), loop.arrival(["F0"], 1), loop.arrival([], 1)) == (2.5, 2.0, 0.0)


def test_without_order_of_time_a_worker_may_find_an_event_that_lies_ahead():
    loop = EventLoop[str](2, delay=0.5)
    assert wakes(loop, {1: [("F0", 2.0)]}, {0: "F0"}) == [(1, 0.0), (0, 0.0)]
    assert loop.arrival(["F0"], 0) == 2.5


def test_workers_are_woken_in_order_of_time():
    loop = EventLoop[str](3, by_time=True)
    found = wakes(loop, {2: [("late", 5.0), ("soon", 1.0)]}, {0: "late", 1: "soon"})
    assert found == [(0, 0.0), (1, 0.0), (2, 0.0), (1, 1.0), (0, 5.0)]


def test_the_last_of_several_events_counts():
    loop = EventLoop[str](1, delay=1.0)
    loop.happen("a", 4.0, 0)
    loop.happen("b", 3.5, 1)
    assert loop.arrival(["a", "b"], 0) == 4.5
    assert loop.arrival(["a", "b", "c"], 0) is None


def test_a_worker_that_asks_twice_is_woken_once():
    loop = EventLoop[str](1, by_time=True)
    seen: Wakes = []
    assert loop.arrival(["a"], 0) is loop.arrival(["a"], 0) is None
    loop.happen("a", 1.0, 0)
    loop.run(lambda worker, time: seen.append((worker, time)))
    assert seen == [(0, 0.0), (0, 1.0)]


def test_a_worker_may_ask_for_a_time():
    loop = EventLoop[str](1, by_time=True)
    seen: Wakes = []
    loop.wake_at(3.0, 0)
    loop.run(lambda worker, time: seen.append((worker, time)))
    assert seen == [(0, 0.0), (0, 3.0)]


def test_workers_that_wait_for_each_other_end_the_loop_with_nothing_happened():
    loop = EventLoop[str](2)
    found = wakes(loop, {0: [("a", 1.0)], 1: [("b", 1.0)]}, {0: "b", 1: "a"})
    assert len(found) == 2
    assert not loop.happened
