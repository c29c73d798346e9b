"""How evenly a device goes (core/steadiness.py): one product after another, each timed, and put together to longer stretches.

slices        [ ][  ][ ][ ][   ][ ][ ][  ]        a few milliseconds each
stretches     [ ][  ] ...    [   ][  ] ...    [      ][       ]        of 1, 4, 16 ... slices, as long as there are enough
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
import torch

from meshwright.core.steadiness import Stretch

SIDE = 256
SLICE_S, LONG_S, QUICK_S = 0.004, 12.0, 2.0
TIMES, LEAST = 4, 12  # of a length there are so many stretches at least


def slices(device: torch.device, *, quick: bool = False) -> tuple[float, ...]:
    """Seconds of each of many slices in a row on `device`, with as many threads as torch is set to.

    None on a GPU: there a slice would time the host, which asks ahead; nobody has looked yet how evenly one goes.
    """
    if device.type != "cpu":
        return ()
    one, wanted = slice_of(), QUICK_S if quick else LONG_S
    found, until = [one() for _ in range(LEAST)], perf_counter() + wanted
    while perf_counter() < until:
        found.append(one())
    return tuple(found)


def slice_of() -> Callable[[], float]:
    """What works for one slice, and says how many seconds that took."""
    x = torch.randn(SIDE, SIDE)
    into = torch.empty_like(x)

    def work(times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            torch.mm(x, x, out=into)
        return perf_counter() - start

    work(3)
    return partial(work, max(1, round(SLICE_S / min(work(1) for _ in range(20)))))


def stretches(ranks: Sequence[Sequence[float]]) -> tuple[Stretch, ...]:
    """What the slices of each of `ranks`, in seconds and as they followed each other, say of lengths of which there are enough.

    Of several ranks those are compared that worked at the same moment: one that is always slower is behind always, and what slows
    all of them down keeps nobody waiting. Of one rank all are compared with each other, as if they were of several.
    """
    found, count, shortest = [], 1, min(map(len, ranks))
    while shortest // count >= LEAST:
        whole = np.asarray([each[: shortest // count * count] for each in ranks]).reshape(len(ranks), -1, count).sum(axis=2)
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
