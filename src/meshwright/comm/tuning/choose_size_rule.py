"""Chooses all-reduce algorithms by message size: predicted times, and a short rule made from them.

A predicted time is that of the cost model (comm/allreduce/cost_model.py) times a correction, if this number
of ranks was measured: the ratio of measured to modelled time, as a mean over neighbouring sizes (with weights
that decay within an octave, which also smooths the noise of single cells). The backend has no list of rounds.
It is modelled as a ring, with a correction from the nearest number of ranks that was measured.

The rule is the cheapest path through the sizes, from small to large, where every change of algorithm costs
`SWITCH_COST`: a change must gain 5 % in all, so that noise makes no long rules.

    size        1 KiB   ...   64 KiB   128 KiB   ...   64 MiB
    doubling     [0.5]  ...   [0.6]     0.9      ...    81
    ring          1.0   ...    0.7     [0.8]     ...   [57]          recursive_doubling <= 64 KiB, else ring
"""

from dataclasses import dataclass
from math import exp, log, log2

from meshwright.comm.allreduce import BACKEND, FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.cost_model import all_reduce_seconds
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.allreduce.size_rule import SizeRule
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.job.errors import format_nbytes

KERNEL_WIDTH_OCTAVES = 1.0  # how far apart, in doublings, two sizes still speak for each other
SWITCH_COST = log(1.05)


@dataclass(frozen=True)
class AlgorithmChoice:
    """A rule for `num_ranks` ranks, and the reason: the predicted times at the largest size of each step.

    `expected_times` has, per step, the size, the algorithm with its seconds, and the one that it is compared
    with ("": there is no other): the backend, or the fastest other one where the backend itself is chosen.
    """

    rule: SizeRule
    num_ranks: int
    expected_times: tuple[tuple[int, str, float, str, float], ...] = ()
    measured_ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        times = [
            f"{format_nbytes(nbytes)} takes {_ms(took)} by {name}{_comparison(rival, other_took)}"
            for nbytes, name, took, rival, other_took in self.expected_times
        ]
        why = f", because {', '.join(times)}" if times else ""
        text = f"auto chose '{self.rule}' for {self.num_ranks} ranks{why}"
        if self.expected_times and self.num_ranks not in self.measured_ranks:
            text += (
                f"; {self.num_ranks} ranks were not measured (only "
                f"{', '.join(map(str, self.measured_ranks))}): the times come from the cost model"
            )
        return text


def predict_all_reduce_s(
    cluster: Cluster, algorithm: str, num_ranks: int, nbytes: float, ranks_per_host: int | None = None
) -> float:
    """Returns the predicted seconds of an all-reduce of `nbytes` among `num_ranks` ranks.

    `ranks_per_host` on each host. Default `ranks_per_host`: as the cluster was measured. The backend's time
    is known only if it was measured with some number of ranks.
    """
    ranks_per_host = cluster.ranks_per_host if ranks_per_host is None else ranks_per_host
    modelled_s = _modelled_seconds(cluster, algorithm, num_ranks, nbytes, ranks_per_host)
    known = [series.ranks for series in cluster.measurements if series.algorithm == algorithm]
    nearest = min(known, key=lambda each: (abs(log(each / num_ranks)), each), default=0)
    if not nearest or (nearest != num_ranks and algorithm != BACKEND):
        return modelled_s
    series = cluster.series(algorithm, nearest)
    if series is None:
        return modelled_s
    weight = total = 0.0
    inside = min(max(nbytes, series.nbytes[0]), series.nbytes[-1])
    for measured, took in zip(series.nbytes, series.seconds, strict=True):
        near = exp(-0.5 * (log2(measured / inside) / KERNEL_WIDTH_OCTAVES) ** 2)
        weight += near
        total += near * log(
            took / _modelled_seconds(cluster, algorithm, nearest, measured, cluster.ranks_per_host)
        )
    return modelled_s * exp(total / weight)


def choose_rule(cluster: Cluster, num_ranks: int, ranks_per_host: int | None = None) -> AlgorithmChoice:
    """Returns the rule by message size with the shortest predicted times.

    The same file gives the same rule.
    """
    if num_ranks == 1:
        return AlgorithmChoice(SizeRule(BACKEND), num_ranks)
    names, sizes = candidate_algorithms(cluster, num_ranks, ranks_per_host), cluster.sizes
    costs = {
        name: [predict_all_reduce_s(cluster, name, num_ranks, nbytes, ranks_per_host) for nbytes in sizes]
        for name in names
    }
    path = cheapest_path(costs)
    ends = [place for place, name in enumerate(path) if place + 1 == len(path) or path[place + 1] != name]
    steps = tuple((sizes[at], path[at], costs[path[at]][at], *_rival(costs, path[at], at)) for at in ends)
    return AlgorithmChoice(
        SizeRule(path[-1], tuple((sizes[at], path[at]) for at in ends[:-1])), num_ranks, steps, cluster.ranks
    )


def candidate_algorithms(cluster: Cluster, num_ranks: int, ranks_per_host: int | None = None) -> list[str]:
    """Returns the algorithms that can run among `num_ranks` ranks and whose time can be predicted."""
    ranks_per_host = cluster.ranks_per_host if ranks_per_host is None else ranks_per_host
    measured = any(series.algorithm == BACKEND for series in cluster.measurements)
    found = [
        str(each)
        for each in FLAT_ALGORITHMS
        if (str(each) != BACKEND or measured) and each.refusal(num_ranks) is None
    ]
    if ranks_per_host and HierarchicalAllReduce(ranks_per_host).refusal(num_ranks) is None and num_ranks > 1:
        found.append(str(HierarchicalAllReduce(ranks_per_host)))
    return found


def cheapest_path(costs: dict[str, list[float]], switch_cost: float = SWITCH_COST) -> list[str]:
    """Returns a name for each position that minimizes the sum of log costs, plus `switch_cost` per change.

    `costs` are seconds by name and position. Ties go to the first name.
    """
    names = list(costs)
    total = {name: log(costs[name][0]) for name in names}
    back: list[dict[str, str]] = []
    for place in range(1, len(costs[names[0]])):
        best = min(names, key=lambda name: total[name])
        came = {name: name if total[name] <= total[best] + switch_cost else best for name in names}
        total = {
            name: total[came[name]] + (switch_cost if came[name] != name else 0.0) + log(costs[name][place])
            for name in names
        }
        back.append(came)
    path = [min(names, key=lambda name: total[name])]
    for came in reversed(back):
        path.append(came[path[-1]])
    return path[::-1]


def _modelled_seconds(
    cluster: Cluster, algorithm: str, num_ranks: int, nbytes: float, ranks_per_host: int
) -> float:
    return all_reduce_seconds(
        get_algorithm(algorithm), num_ranks, nbytes, cluster.network, min(ranks_per_host, num_ranks)
    )


def _ms(took: float) -> str:
    return f"{1e3 * took:.3g} ms"


def _comparison(rival: str, took: float) -> str:
    return f" ({_ms(took)} by {rival})" if rival else ""


def _rival(costs: dict[str, list[float]], chosen: str, at: int) -> tuple[str, float]:
    """Returns the algorithm that `chosen` is compared with at size `at`, and its seconds."""
    if chosen != BACKEND and BACKEND in costs:
        return BACKEND, costs[BACKEND][at]
    others = [name for name in costs if name != chosen]
    fastest = min(others, key=lambda name: costs[name][at], default="")
    return fastest, costs[fastest][at] if fastest else 0.0
