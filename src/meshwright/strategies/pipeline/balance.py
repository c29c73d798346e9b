"""Where to cut a model into parts: such that the most costly part costs as little as can be.

    costs   embed 0 | layer 5 | layer 5 | layer 5 | layer 5 | head 9        3 parts: 10 | 10 | 9
    most(k, j) = min over i of max(most(k - 1, i), cost of the visits from i to j)

Cost: parts x borders^2 steps on paper. Of several cuts with the same most costly part the one with the earliest borders is taken.
Limits: what a part costs is the sum of its visits, whatever crosses its borders.
Paper: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP), section 3.1.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate


def balanced(costs: Mapping[str, float], opened: Sequence[str], count: int) -> tuple[str, ...]:
    """The visits, of `opened`, with which the second and later ones of `count` parts begin; `costs` are in order of the forward.

    There must be `count - 1` open borders at least.
    """
    visits = list(costs)
    before = [0.0, *accumulate(costs.values())]
    starts = [0, *(visits.index(visit) for visit in opened), len(visits)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {end: (before[end], ()) for end in starts[1:]}
    for parts in range(2, count + 1):
        ends = starts[parts:]
        best = {end: min(_last(best, start, before[end] - before[start]) for start in best if start < end) for end in ends}
    return tuple(visits[at] for at in best[len(visits)][1])


def _last(best: Mapping[int, tuple[float, tuple[int, ...]]], start: int, cost: float) -> tuple[float, tuple[int, ...]]:
    most, cuts = best[start]
    return max(most, cost), (*cuts, start)
