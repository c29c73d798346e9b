"""Models stragglers: of several devices that synchronize, one is always the last, and the others wait for it.

    rank 0  [======]..|[=======]|[====]...|     work takes sometimes less, sometimes more; a step
    rank 1  [========]|[=====]..|[=======]|     takes the sum of the longest, not the longest of the sums

Pieces of work were timed many times. `lag` is how far the later of two devices is behind their mean, as a
fraction of it: half the mean difference of two timings. Of n ranks the last is further behind, by the ratio
of the expected maxima of n and of 2 normal variables. Disturbances last for some time, so long pieces of work
differ less than short ones, but more than independent parts would: the lag is measured by length.

Paper: H. A. David and H. N. Nagaraja 2003, Order Statistics, 3rd edition, sections 3.1 and 9.4,
doi:10.1002/0471722162.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import log, sqrt
from statistics import NormalDist

NUM_INTEGRATION_STEPS = 2000  # of the sum that approximates the expected value


@dataclass(frozen=True)
class StragglerSample:
    """Work of `seconds`: how far the later of two devices is behind their mean, as a fraction of the work."""

    seconds: float
    lag: float


@cache
def expected_maximum(num_ranks: int) -> float:
    """Returns the expected maximum of `num_ranks` standard normal variables."""
    distribution = NormalDist()
    quantiles = [(each + 0.5) / NUM_INTEGRATION_STEPS for each in range(NUM_INTEGRATION_STEPS)]
    return (
        sum(distribution.inv_cdf(quantile ** (1 / num_ranks)) for quantile in quantiles)
        / NUM_INTEGRATION_STEPS
        if num_ranks > 1
        else 0.0
    )


def straggler_delay(stretches: Sequence[StragglerSample], seconds: float, num_ranks: int) -> float:
    """Seconds that the last of `num_ranks` is behind their mean, after work of `seconds`; 0 without
    measurements.
    """
    if num_ranks < 2 or seconds <= 0 or not stretches:
        return 0.0
    return seconds * _lag_fraction(stretches, seconds) * expected_maximum(num_ranks) / expected_maximum(2)


def _lag_fraction(stretches: Sequence[StragglerSample], seconds: float) -> float:
    if seconds <= stretches[0].seconds:
        return stretches[0].lag
    for low, high in pairwise(stretches):
        if seconds <= high.seconds:
            fraction = log(seconds / low.seconds) / log(high.seconds / low.seconds)
            return low.lag + fraction * (high.lag - low.lag)
    return stretches[-1].lag * sqrt(stretches[-1].seconds / seconds)
