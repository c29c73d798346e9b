"""Measures the jitter of a device: the same work is repeated and timed, and summed over windows of several
lengths.

    slices     [ ][  ][ ][ ][   ][ ][ ][  ]        the same products each, some milliseconds; a barrier before
                                                   each 64
    windows    [ ][  ] ...    [   ][  ] ...    [      ][       ]        of 1, 4, 16 and 64 slices

Every rank does the same work in a slice, and no window crosses a barrier: windows that are compared are the
same work at the same time.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch

from meshwright.plan.hardware.straggler_delay import StragglerSample

MATMUL_SIZE, NUM_MATMULS = 256, 10  # of a slice: about 5 ms on a core, the same work on every rank


SLICES_PER_BATCH, NUM_BATCHES, NUM_QUICK_BATCHES = 64, 40, 3


WINDOW_GROWTH, MIN_WINDOWS = 4, 12  # at least so many windows of a length


def time_slices(
    device: torch.device, barrier: Callable[[], None] = lambda: None, *, quick: bool = False
) -> tuple[float, ...]:
    """Returns the seconds of consecutive slices of work on `device`, with torch's current number of threads;
    `barrier` runs between batches.

    Returns () on a GPU: a slice would time the host, which only enqueues.
    """
    if device.type != "cpu":
        return ()
    batch, found = slice_batch_timer(), list[float]()
    for _ in range(NUM_QUICK_BATCHES if quick else NUM_BATCHES):
        barrier()
        found += batch()
    return tuple(found)


def slice_batch_timer() -> Callable[[], tuple[float, ...]]:
    """Returns a function that runs a batch of slices and returns their seconds."""
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    out = torch.empty_like(x)

    def time_slice() -> float:
        start = perf_counter()
        for _ in range(NUM_MATMULS):
            torch.mm(x, x, out=out)
        return perf_counter() - start

    time_slice()
    return lambda: tuple(time_slice() for _ in range(SLICES_PER_BATCH))


def timing_windows(ranks: Sequence[Sequence[float]]) -> tuple[StragglerSample, ...]:
    """Returns the lag of windows of each length, from the slices of `ranks` in seconds, in order.

    The windows of several ranks are compared at the same time: a rank that is always slower always lags, and
    what slows all of them down makes no rank wait. The windows of a single rank are compared with each
    other, as if they were of several ranks.
    """
    found, count, shortest = [], 1, min(map(len, ranks)) // SLICES_PER_BATCH * SLICES_PER_BATCH
    while count <= SLICES_PER_BATCH and shortest // count >= MIN_WINDOWS:
        windows = np.asarray([each[:shortest] for each in ranks]).reshape(len(ranks), -1, count).sum(axis=2)
        mean = float(windows.mean())
        distance = (
            _mean_distance(windows[0])
            if len(ranks) == 1
            else float(np.mean([_mean_distance(moment) for moment in windows.T]))
        )
        found.append(StragglerSample(mean, distance / 2 / mean))
        count *= WINDOW_GROWTH
    return tuple(found)


def _mean_distance(values: np.ndarray) -> float:
    count = len(values)
    weights = 2 * np.arange(count) - count + 1
    return float(2 * (weights * np.sort(values)).sum() / (count * (count - 1)))
