"""Batches made ahead of their step, so that no rank waits for its data.

    step            0    1    2    3         the main thread plays
    made ahead      1 2  3 4  5 ...          `workers` threads make the rows of coming steps, at most 2 x workers of them

Threads are enough: the rows are cut out of arrays in memory or mapped from disk, numpy and the tokenizers let go of the
interpreter while they work, and nothing has to be sent between processes, or found again when one of them dies. Which
rows a step has is decided by its number alone, so the order is the same with any number of workers. A stream has one
reader, so it takes one thread.

An error in a thread is raised by the step that wanted the rows, with the traceback of where it happened. On leaving,
what has not begun is dropped and what has begun is waited for; when it is an error that leaves, for `FAILURE_S` at most,
so that a thread that waits for a network does not keep the error from being told.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from meshwright.run.data.feed import Dataset, Feed

FAILURE_WAIT_S = 1.0
MaybeBatch = dict[str, torch.Tensor] | None


@dataclass
class PrefetchedFeed:
    """A feed whose coming steps are made by the threads of `pool`, at most `depth` of them ahead of use."""

    feed: Feed
    pool: ThreadPoolExecutor
    depth: int
    _first: int = 0  # the step of the first in the queue
    _queue: deque[Future[tuple[bool, MaybeBatch]]] = field(default_factory=deque)

    @property
    def dataset(self) -> Dataset:
        """The samples."""
        return self.feed.dataset

    @property
    def num_steps(self) -> int | None:
        """The global steps that the samples last; None when that is not known, or without end."""
        return self.feed.num_steps

    def sample_ids(self, step: int) -> list[list[int]]:
        """The ids of the samples that each data rank plays in global step `step`."""
        return self.feed.sample_ids(step)

    def has_ended(self, step: int) -> bool:
        """Whether the samples end before global step `step`."""
        return self._made(step)[0]

    def batch(self, step: int) -> MaybeBatch:
        """This rank's rows of global step `step` (from 0); None when all are absent."""
        return self._made(step)[1]

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until nothing is being made any more, at most `timeout_s` seconds."""
        wait(self._queue, timeout_s)

    def _made(self, step: int) -> tuple[bool, MaybeBatch]:
        """What was made for `step`; what was made for earlier steps is forgotten."""
        if step < self._first or step > self._first + len(self._queue):
            self._drop(len(self._queue))
            self._first = step
        self._drop(step - self._first)
        self._first = step
        while len(self._queue) <= self.depth:
            self._queue.append(self.pool.submit(self._make, self._first + len(self._queue)))
        return self._queue[0].result()

    def _make(self, step: int) -> tuple[bool, MaybeBatch]:
        over = self.feed.has_ended(step)
        return over, None if over else self.feed.batch(step)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft().cancel()


@contextmanager
def prefetch(feed: Feed, workers: int) -> Iterator[Feed | PrefetchedFeed]:
    """`feed`, with its coming steps made by `workers` threads; with 0, `feed` itself. No thread is left on leaving."""
    if not workers:
        yield feed
        return
    workers = workers if feed.is_thread_safe else 1
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    made = PrefetchedFeed(feed, pool, 2 * workers)
    try:
        yield made
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        made.wait_idle(FAILURE_WAIT_S)
        raise
    pool.shutdown(wait=True, cancel_futures=True)
