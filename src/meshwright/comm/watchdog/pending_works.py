"""Keeps the works of a backend whose waits do not block, so that a thread sees which one does not end.

A wait for NCCL only orders streams: the host goes on, and stops somewhere later, where a number is read. No
limit is reached there, and nothing says which collective is missing. So the thread of the watchdog asks the
oldest work that has not ended whether it has:

    issued     all_gather(7)  all_reduce(8)  reduce_scatter(9) ...
    ended      yes            no: the oldest, since all_gather(7) was seen to have ended

Asking costs the query of an event; it does not stop the device.
"""

import time
from collections import deque
from collections.abc import Callable
from threading import Lock


class PendingWorks:
    """The works of one rank that were issued and not yet seen to have ended, oldest first."""

    def __init__(self) -> None:
        self._works: deque[tuple[int, Callable[[], bool]]] = deque()
        self._since = time.monotonic()
        self._lock = Lock()

    def add(self, sequence_id: int, is_completed: Callable[[], bool]) -> None:
        """Adds the work of the collective with this `sequence_id`."""
        with self._lock:
            if not self._works:
                self._since = time.monotonic()
            self._works.append((sequence_id, is_completed))

    def oldest(self) -> tuple[int, float] | None:
        """Returns the oldest work that has not ended, and for how many seconds it has been the oldest.

        A work that ended with an error counts as not ended: only its waits may report it.
        """
        with self._lock:
            while self._works:
                sequence_id, is_completed = self._works[0]
                try:
                    has_ended = is_completed()
                except RuntimeError:
                    has_ended = False
                if not has_ended:
                    return sequence_id, time.monotonic() - self._since
                self._works.popleft()
                self._since = time.monotonic()
            return None
