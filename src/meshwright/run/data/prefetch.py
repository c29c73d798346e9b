"""Prepares batches in threads, ahead of their step, so that no rank waits for its data.

    step            0    1    2    3         the main thread trains
    prepared        1 2  3 4  5 ...          `workers` threads prepare the next batches, at most 2 x workers
                                             of them

Threads are enough: samples are slices of arrays in memory or mapped from disk, numpy and the tokenizers
release the GIL, and nothing has to be sent between processes. The samples of a step depend on its number
only, so the order is the same with any number of workers. A stream has one reader, so it uses one thread.

An error in a thread is raised by the step that needs the batch, with the traceback of the thread. On exit,
batches that have not begun are dropped and the others are waited for; after an error, at most
`FAILURE_WAIT_S` seconds, so that a thread that waits for a network does not delay the error.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from meshwright.run.data.local_batches import Dataset, LocalBatches

FAILURE_WAIT_S = 1.0
MaybeBatch = dict[str, torch.Tensor] | None


@dataclass
class PrefetchedBatches:
    """Local batches that the threads of `pool` prepare, at most `depth` of them ahead of their step."""

    batches: LocalBatches
    pool: ThreadPoolExecutor
    depth: int
    _first: int = 0  # the step of the first in the queue
    _queue: deque[Future[tuple[bool, MaybeBatch]]] = field(default_factory=deque)

    @property
    def dataset(self) -> Dataset:
        """The samples."""
        return self.batches.dataset

    @property
    def num_steps(self) -> int | None:
        """The number of global steps until the samples end; None if unknown or without end."""
        return self.batches.num_steps

    def sample_ids(self, step: int) -> list[list[int]]:
        """Returns the ids of the samples of each data rank in global step `step`."""
        return self.batches.sample_ids(step)

    def has_ended(self, step: int) -> bool:
        """Returns whether the samples end before global step `step`."""
        return self._prepare(step)[0]

    def batch(self, step: int) -> MaybeBatch:
        """Returns this rank's samples of global step `step` (from 0); None when all are absent."""
        return self._prepare(step)[1]

    def wait_idle(self, timeout_s: float) -> None:
        """Waits until no batch is being prepared, at most `timeout_s` seconds."""
        wait(self._queue, timeout_s)

    def _prepare(self, step: int) -> tuple[bool, MaybeBatch]:
        if step < self._first or step > self._first + len(self._queue):
            self._drop(len(self._queue))
            self._first = step
        self._drop(step - self._first)
        self._first = step
        while len(self._queue) <= self.depth:
            self._queue.append(self.pool.submit(self._make, self._first + len(self._queue)))
        return self._queue[0].result()

    def _make(self, step: int) -> tuple[bool, MaybeBatch]:
        over = self.batches.has_ended(step)
        return over, None if over else self.batches.batch(step)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._queue.popleft().cancel()


@contextmanager
def prefetch(batches: LocalBatches, workers: int) -> Iterator[LocalBatches | PrefetchedBatches]:
    """Yields `batches` with the next ones prepared by `workers` threads; with 0, `batches` itself. All
    threads end on exit.
    """
    if not workers:
        yield batches
        return
    workers = workers if batches.is_thread_safe else 1
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    made = PrefetchedBatches(batches, pool, 2 * workers)
    try:
        yield made
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        made.wait_idle(FAILURE_WAIT_S)
        raise
    pool.shutdown(wait=True, cancel_futures=True)
