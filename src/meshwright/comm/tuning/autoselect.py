"""Which all-reduce algorithm for which size: what is expected of each, and a short rule made from it.

What is expected is the model's price (comm/algorithms/pricing.py) times a correction, where this number of ranks was measured:
the ratio of measured to modelled time, as a mean over the neighbouring sizes (weights that fall off within an octave, which
also smooths what one cell's noise would say). The backend is no list of rounds. It is modelled as a ring, and its correction,
taken from the nearest number of ranks that was measured, turns that into what it is.

The rule is the cheapest path through the sizes, from small to large, where every change of algorithm costs `SWITCH`: a change
must gain 5 % in all, so that noise makes no long rules.

    size        1 KiB   ...   64 KiB   128 KiB   ...   64 MiB
    doubling     [0.5]  ...   [0.6]     0.9      ...    81
    ring          1.0   ...    0.7     [0.8]     ...   [57]          doubling <= 64 KiB, else ring
"""

from dataclasses import dataclass
from math import exp, log, log2

from meshwright.comm.algorithms import BACKEND, PLAIN, named
from meshwright.comm.algorithms.cost_model import seconds
from meshwright.comm.algorithms.hierarchical import Hierarchical
from meshwright.comm.algorithms.size_rule import Rule
from meshwright.plan.hardware.network_model import Cluster
from meshwright.plan.job.errors import format_nbytes

OCTAVES = 1.0  # how far apart, in doublings, two sizes still speak for each other
SWITCH = log(1.05)


@dataclass(frozen=True)
class Choice:
    """A rule for `ranks` ranks, and why: for the largest size of each of its steps, what it and the backend are to take."""

    rule: Rule
    ranks: int
    steps: tuple[tuple[int, str, float, float | None], ...] = ()
    measured: tuple[int, ...] = ()

    def __str__(self) -> str:
        told = [
            f"{format_nbytes(nbytes)} takes {_ms(took)}{_beside(name, usual)}"
            for nbytes, name, took, usual in self.steps
        ]
        why = f", because {', '.join(told)}" if told else ""
        text = f"auto chose '{self.rule}' for {self.ranks} ranks{why}"
        if self.steps and self.ranks not in self.measured:
            text += f"; {self.ranks} ranks were not measured (only {', '.join(map(str, self.measured))}): the model says so"
        return text


def predicted(
    cluster: Cluster, algorithm: str, ranks: int, nbytes: float, per_host: int | None = None
) -> float:
    """The seconds that an all-reduce of `nbytes` among `ranks` ranks is to take, `per_host` of them on each host.

    Without `per_host`: as the cluster was measured. The backend is only known where it was measured with some number of ranks.
    """
    per_host = cluster.ranks_per_host if per_host is None else per_host
    price = _price(cluster, algorithm, ranks, nbytes, per_host)
    known = [series.ranks for series in cluster.measurements if series.algorithm == algorithm]
    nearest = min(known, key=lambda each: (abs(log(each / ranks)), each), default=0)
    if not nearest or (nearest != ranks and algorithm != BACKEND):
        return price
    series = cluster.series(algorithm, nearest)
    if series is None:
        return price
    weight = total = 0.0
    inside = min(max(nbytes, series.nbytes[0]), series.nbytes[-1])
    for measured, took in zip(series.nbytes, series.seconds, strict=True):
        near = exp(-0.5 * (log2(measured / inside) / OCTAVES) ** 2)
        weight += near
        total += near * log(took / _price(cluster, algorithm, nearest, measured, cluster.ranks_per_host))
    return price * exp(total / weight)


def choose(cluster: Cluster, ranks: int, per_host: int | None = None) -> Choice:
    """The rule by message size that is expected to take least time among `ranks` ranks; the same file gives the same rule."""
    if ranks == 1:
        return Choice(Rule(BACKEND), ranks)
    names, sizes = candidates(cluster, ranks, per_host), cluster.sizes
    costs = {name: [predicted(cluster, name, ranks, nbytes, per_host) for nbytes in sizes] for name in names}
    path = cheapest(costs)
    ends = [place for place, name in enumerate(path) if place + 1 == len(path) or path[place + 1] != name]
    usual = costs.get(BACKEND)
    steps = tuple((sizes[at], path[at], costs[path[at]][at], usual[at] if usual else None) for at in ends)
    return Choice(
        Rule(path[-1], tuple((sizes[at], path[at]) for at in ends[:-1])), ranks, steps, cluster.ranks
    )


def candidates(cluster: Cluster, ranks: int, per_host: int | None = None) -> list[str]:
    """The algorithms that can run among `ranks` ranks, and of which it can be said what they take."""
    per_host = cluster.ranks_per_host if per_host is None else per_host
    measured = any(series.algorithm == BACKEND for series in cluster.measurements)
    found = [
        str(each) for each in PLAIN if (str(each) != BACKEND or measured) and each.refusal(ranks) is None
    ]
    if per_host and Hierarchical(per_host).refusal(ranks) is None and ranks > 1:
        found.append(str(Hierarchical(per_host)))
    return found


def cheapest(costs: dict[str, list[float]], switch: float = SWITCH) -> list[str]:
    """For each place the name to take, so that the sum of the logarithms of their costs, and `switch` per change, is least.

    `costs` are seconds by name and place. Of equals the first name wins.
    """
    names = list(costs)
    total = {name: log(costs[name][0]) for name in names}
    back: list[dict[str, str]] = []
    for place in range(1, len(costs[names[0]])):
        best = min(names, key=lambda name: total[name])
        came = {name: name if total[name] <= total[best] + switch else best for name in names}
        total = {
            name: total[came[name]] + (switch if came[name] != name else 0.0) + log(costs[name][place])
            for name in names
        }
        back.append(came)
    path = [min(names, key=lambda name: total[name])]
    for came in reversed(back):
        path.append(came[path[-1]])
    return path[::-1]


def _price(cluster: Cluster, algorithm: str, ranks: int, nbytes: float, per_host: int) -> float:
    return seconds(named(algorithm), ranks, nbytes, cluster.network, min(per_host, ranks))


def _ms(took: float) -> str:
    return f"{1e3 * took:.3g} ms"


def _beside(name: str, usual: float | None) -> str:
    return "" if name == BACKEND or usual is None else f" by {name} ({_ms(usual)} by the backend)"
