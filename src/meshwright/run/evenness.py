"""How evenly a device goes (core/steadiness.py): the same work over and over, timed, and put together to longer stretches.

    slices        [ ][  ][ ][ ][   ][ ][ ][  ]        the same products each, some milliseconds; ranks meet before each 64
    stretches     [ ][  ] ...    [   ][  ] ...    [      ][       ]        of 1, 4, 16 and 64 slices, of which there are enough

Every rank does as much in a slice as every other, and no stretch goes on beyond a meeting: so stretches that are compared are the
same work at the same moment.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import torch

from meshwright.core.steadiness import Stretch

SIDE, PRODUCTS = 256, 10  # of a slice: on a core of today about 5 ms, on every rank the same work
BATCH, BATCHES, QUICK_BATCHES = 64, 40, 3
TIMES, LEAST = 4, 12  # of a length there are so many stretches at least


def slices(device: torch.device, meet: Callable[[], None] = lambda: None, *, quick: bool = False) -> tuple[float, ...]:
    """Seconds of each of many slices in a row on `device`, with as many threads as torch is set to; ranks `meet` on the way.

    None on a GPU: there a slice would time the host, which asks ahead; nobody has looked yet how evenly one goes.
    """
    if device.type != "cpu":
        return ()
    batch, found = batches(), list[float]()
    for _ in range(QUICK_BATCHES if quick else BATCHES):
        meet()
        found += batch()
    return tuple(found)


def batches() -> Callable[[], tuple[float, ...]]:
    """What works for a batch of slices, and says how many seconds each took."""
    x = torch.randn(SIDE, SIDE)
    into = torch.empty_like(x)

    def one() -> float:
        start = perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(x, x, out=into)
        return perf_counter() - start

    one()
    return lambda: tuple(one() for _ in range(BATCH))


def stretches(ranks: Sequence[Sequence[float]]) -> tuple[Stretch, ...]:
    """What the slices of each of `ranks`, in seconds and as they followed each other, say of lengths of which there are enough.

    Of several ranks those are compared that worked at the same moment: one that is always slower is behind always, and what slows
    all of them down keeps nobody waiting. Of one rank all are compared with each other, as if they were of several.
    """
    found, count, shortest = [], 1, min(map(len, ranks)) // BATCH * BATCH
    while count <= BATCH and shortest // count >= LEAST:
        whole = np.asarray([each[:shortest] for each in ranks]).reshape(len(ranks), -1, count).sum(axis=2)
        mean = float(whole.mean())
        apart = _apart(whole[0]) if len(ranks) == 1 else float(np.mean([_apart(moment) for moment in whole.T]))
        found.append(Stretch(mean, apart / 2 / mean))
        count *= TIMES
    return tuple(found)


def _apart(some: np.ndarray) -> float:
    """The mean distance of two of these."""
    count = len(some)
    places = 2 * np.arange(count) - count + 1
    return float(2 * (places * np.sort(some)).sum() / (count * (count - 1)))
