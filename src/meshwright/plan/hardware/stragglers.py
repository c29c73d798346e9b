"""How evenly a device goes: one of several that meet is always the last, and the others wait for it.

    rank 0  [======]..|[=======]|[====]...|        each stretch of work takes now a little less, now a little more;
    rank 1  [========]|[=====]..|[=======]|        what a step takes is the sum of the longest, not the longest of the sums

A stretch was timed many times over. `behind` is how far the later of two is behind their mean, as a share of it: half the mean
distance of two stretches. Of n ranks the last is further behind, by the expected largest of n draws from a normal distribution
over that of 2. Disturbances last, so that long stretches differ less than short ones, but more than if each part of them were
drawn anew: the share is measured by length.

Paper: H. A. David and H. N. Nagaraja 2003, Order Statistics, 3rd edition, sections 3.1 and 9.4, doi:10.1002/0471722162.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log, sqrt
from statistics import NormalDist

NUM_INTEGRATION_STEPS = 2000  # steps of the sum that an expected value is


@dataclass(frozen=True)
class LagSample:
    """Work that takes so many `seconds`: how far the later of two is behind, as a share of them."""

    seconds: float
    lag: float


@cache
def expected_maximum(num_ranks: int) -> float:
    """The expected largest of so many draws from a normal distribution, in standard deviations."""
    normal, places = (
        NormalDist(),
        [(each + 0.5) / NUM_INTEGRATION_STEPS for each in range(NUM_INTEGRATION_STEPS)],
    )
    return (
        sum(normal.inv_cdf(place ** (1 / num_ranks)) for place in places) / NUM_INTEGRATION_STEPS
        if num_ranks > 1
        else 0.0
    )


def straggler_delay(stretches: Sequence[LagSample], seconds: float, num_ranks: int) -> float:
    """Seconds that the last of `ranks` is behind their mean, after work of so many `seconds`; 0 where nothing was measured."""
    if num_ranks < 2 or seconds <= 0 or not stretches:
        return 0.0
    return seconds * _lag_fraction(stretches, seconds) * expected_maximum(num_ranks) / expected_maximum(2)


def _lag_fraction(stretches: Sequence[LagSample], seconds: float) -> float:
    if seconds <= stretches[0].seconds:
        return stretches[0].lag
    for low, high in pairwise(stretches):
        if seconds <= high.seconds:
            part = log(seconds / low.seconds) / log(high.seconds / low.seconds)
            return low.lag + part * (high.lag - low.lag)
    return stretches[-1].lag * sqrt(stretches[-1].seconds / seconds)
