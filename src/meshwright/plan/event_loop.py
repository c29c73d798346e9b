"""Decides who acts next in a simulation: one loop for schedules, simulated programs and deadlock checks.

A *worker* does one action after another: a rank of a schedule, a role of a program. An *event* is what
workers wait for, mostly the end of an action, which other workers see after a delay. Each worker is woken at
time 0. It does what it can and says which events happen by that, and when; then it waits for a time, or for
an event that has not happened:

    rank 0   F0 - F1 -            wakes at 0: F0 happens at 2, F1 at 4
    rank 1   ..... F0 -           wakes at 0: F0 has not happened; is woken when it does, at 2 + delay

The loop ends when nobody is left to be woken. Workers that are not finished then wait for each other, or for
what never happens: a deadlock. What a worker does is its policy:

    simulation        the next action of its list       of programs and of schedules
    deadlock check    the same, all events at time 0    between pipeline ranks
    list scheduling   the best action that is ready     automatic, ZB-2p
    filling bubbles   the next of its list, or a W      ZB-2p, V-Half, V-Min

The last two choose by what has arrived already, so their workers are woken in order of time. For fixed lists
the order does not change the result, and the loop is faster without it.
"""

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import Generic, TypeVar

EventT = TypeVar("EventT", bound=Hashable)


class EventLoop(Generic[EventT]):
    """Wakes workers, by number. An event reaches other workers `delay` after it happened.

    With `by_time` workers are woken in order of time. `happened` holds the time and the worker of each event;
    the time may be later than that of the loop.
    """

    def __init__(self, num_workers: int, delay: float = 0.0, *, by_time: bool = False) -> None:
        self.happened: dict[EventT, tuple[float, int]] = {}
        self._delay = delay
        self._waiting: dict[EventT, list[int]] = {}
        self._agenda = [(0.0, worker) for worker in range(num_workers)]
        self._push: Callable[[tuple[float, int]], None] = (
            partial(heappush, self._agenda) if by_time else self._agenda.append
        )
        self._pop = partial(heappop, self._agenda) if by_time else self._agenda.pop

    def run(self, wake: Callable[[int, float], None]) -> None:
        """Calls `wake(worker, time)` until nobody is left to be woken."""
        while self._agenda:
            time, worker = self._pop()
            wake(worker, time)

    def wake_at(self, time: float, worker: int) -> None:
        """Wakes `worker` at `time`."""
        self._push((time, worker))

    def happen(self, event: EventT, time: float, worker: int) -> None:
        """Says that `event` happens at `time`, by `worker`, and wakes those that wait for it when it reaches
        them.
        """
        self.happened[event] = time, worker
        if event in self._waiting:
            for other in self._waiting.pop(event):
                self._push((time if other == worker else time + self._delay, other))

    def arrival(self, events: Iterable[EventT], worker: int) -> float | None:
        """Returns when the last of `events` reaches `worker`; None if one has not happened: `worker` waits
        for it.
        """
        latest = 0.0
        for event in events:
            if event not in self.happened:
                waiting = self._waiting.setdefault(event, [])
                if worker not in waiting:
                    waiting.append(worker)
                return None
            time, origin = self.happened[event]
            if origin != worker:
                time += self._delay
            if time > latest:  # faster than max()
                latest = time
        return latest
