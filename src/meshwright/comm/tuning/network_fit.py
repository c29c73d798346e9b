"""Fits a network model to measured all-reduce times: nonnegative least squares over the loads of the rounds.

The predicted time of an all-reduce (comm/allreduce/cost_model.py) is a sum of constants of the network, each
multiplied by how often the rounds need it. So every measured cell is one equation, and the constants are the
solution with the least relative error:

    time of a cell  =  sum over k  (rounds in which k ranks of a host receive) x overhead(k)
                     + sum over bands  messages x latency + bytes / rate       through the host
                     + bytes / rate of the busiest rank  +  bytes / rate of local sums  +  ... between hosts

Bands are those of `BAND_LIMITS`, by the size of one message (not of the tensor); a band without messages is
left out. No constant is negative. The backend's own all-reduce is no list of rounds, so it is not used here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, inf, log
from statistics import median

import numpy as np
from scipy.optimize import nnls

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.cost_model import RoundLoad, round_loads
from meshwright.comm.tuning.choose_size_rule import predict_all_reduce_s
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, AllReduceTiming, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

BAND_LIMITS = (16 << 10, 256 << 10, 4 << 20, 0)  # 0: the last band is open
MAX_BYTES_PER_S = 1e15  # bytes per second, where a byte costs nothing that could be measured
LINK_NAMES = ("intra_host", "busiest_rank", "local_sum", "inter_host")
# the links with their own latency; the overhead of a round is that of the others
LINKS_WITH_LATENCY = (
    "intra_host",
    "inter_host",
)

# a link or "overhead", the size band or the number of receivers, "latency" or "bytes"
NetworkFeature = tuple[str, int, str]


def fit_network(timings: Iterable[AllReduceTiming], ranks_per_host: int = 0) -> NetworkModel:
    """Returns the network model nearest to `timings`, measured with `per_host` ranks on each host (0.

    All on one). Raises ValueError when no algorithm but the backend was measured.
    """
    cells = [cell for cell in timings if cell.algorithm != BACKEND]
    if not cells:
        raise ValueError(
            "only the backend was measured, whose rounds are not known; measure other algorithms too"
        )
    asked = [_cell_features(cell, ranks_per_host) for cell in cells]
    columns = sorted({feature for each in asked for feature in each})
    matrix = np.array(
        [
            [each.get(feature, 0.0) / cell.seconds for feature in columns]
            for each, cell in zip(asked, cells, strict=True)
        ]
    )
    figures = dict(zip(columns, nonnegative_least_squares(matrix, np.ones(len(cells))), strict=True))
    overheads = tuple(
        RoundOverhead(number, float(value))
        for (part, number, _), value in figures.items()
        if part == "overhead"
    )
    links = {part: _link_cost(part, figures) for part in LINK_NAMES}
    return NetworkModel(overheads, **links)


def with_fit(cluster: Cluster, timings: Sequence[AllReduceTiming]) -> Cluster:
    """Returns `cluster` with `timings` as its measurements, the network fitted to them.

    And the prediction errors. The errors are those of a fit to every other size, evaluated on the sizes
    between.
    """
    sizes = sorted({cell.nbytes for cell in timings})
    kept = [cell for cell in timings if cell.nbytes in sizes[::2]]
    other = [cell for cell in timings if cell.nbytes not in sizes[::2]]
    half = replace(
        cluster, network=fit_network(kept, cluster.ranks_per_host), measurements=group_into_series(kept)
    )
    plain = [cell for cell in other if cell.algorithm != BACKEND]
    model = median(_prediction_error(half.without_measurements(), cell) for cell in plain)
    corrected = median(_prediction_error(half, cell) for cell in other)
    whole = replace(
        cluster, network=fit_network(timings, cluster.ranks_per_host), measurements=group_into_series(timings)
    )
    return replace(whole, fit_error=FitError(round(model, 4), round(corrected, 4)))


def group_into_series(timings: Iterable[AllReduceTiming]) -> tuple[AllReduceSeries, ...]:
    """Returns `timings` as one series per algorithm and number of ranks."""
    cells: dict[tuple[int, str], list[AllReduceTiming]] = {}
    for cell in sorted(timings, key=lambda cell: cell.nbytes):
        cells.setdefault((cell.ranks, cell.algorithm), []).append(cell)
    return tuple(
        AllReduceSeries(
            name,
            ranks,
            tuple(cell.nbytes for cell in found),
            tuple(cell.seconds for cell in found),
            tuple(round(cell.spread, 3) for cell in found),
        )
        for (ranks, name), found in cells.items()
    )


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Returns the x >= 0 that minimizes |`matrix` x - `target`|."""
    scale = np.maximum(
        matrix.max(0), 1e-300
    )  # columns of one size: bytes and rounds differ by many powers of ten
    return nnls(matrix / scale, target)[0] / scale


def _cell_features(cell: AllReduceTiming, per_host: int) -> dict[NetworkFeature, float]:
    """The number of uses of each constant of the network in the rounds of a cell."""
    asked: dict[NetworkFeature, float] = {}
    for demand, count in round_loads(get_algorithm(cell.algorithm), cell.ranks, min(per_host, cell.ranks)):
        for feature, amount in _round_features(demand, cell.nbytes):
            asked[feature] = asked.get(feature, 0.0) + count * amount
    return asked


def _round_features(demand: RoundLoad, nbytes: int) -> list[tuple[NetworkFeature, float]]:
    found: list[tuple[NetworkFeature, float]] = []
    messages: dict[str, list[tuple[float, float]]] = {
        "local_sum": [(demand.local_sum * nbytes, 1)] if demand.local_sum else []
    }
    if demand.inter_host:
        messages["inter_host"] = [(demand.inter_host * nbytes, 1)]
    else:
        messages |= {"intra_host": [(share * nbytes, count) for share, count in demand.intra_host]}
        messages |= {"busiest_rank": [(share * nbytes, count) for share, count in demand.busiest_rank]}
        found.append((("overhead", demand.num_receivers, "latency"), 1))
    for part, sizes in messages.items():
        for size, count in sizes:
            band = _band_index(size)
            found.append(((part, band, "bytes"), count * size))
            found += [((part, band, "latency"), count)] if part in LINKS_WITH_LATENCY else []
    return found


def _band_index(nbytes: float) -> int:
    return next(number for number, bound in enumerate(BAND_LIMITS) if nbytes <= (bound or inf))


def _link_cost(part: str, figures: dict[NetworkFeature, float]) -> LinkCost | None:
    numbers = sorted(band for name, band, kind in figures if (name, kind) == (part, "bytes"))
    bands = []
    for band in numbers:
        slowness, latency = figures[part, band, "bytes"], figures.get((part, band, "latency"), 0.0)
        upto = 0 if band == numbers[-1] else BAND_LIMITS[band]
        bands.append(
            SizeBand(
                upto,
                float(latency),
                float(min(MAX_BYTES_PER_S, 1 / slowness)) if slowness > 0 else MAX_BYTES_PER_S,
            )
        )
    return LinkCost(tuple(bands)) if bands else None


def _prediction_error(cluster: Cluster, cell: AllReduceTiming) -> float:
    """The relative error of a prediction; too low and too high count the same."""
    guess = predict_all_reduce_s(cluster, cell.algorithm, cell.ranks, cell.nbytes)
    return exp(abs(log(guess / cell.seconds))) - 1


@dataclass(frozen=True)
class AlphaBetaFit:
    """The latency and bandwidth of the textbook's formulas that fit best.

    And the median relative error that remains.
    """

    latency_s: float
    bytes_per_s: float
    error: float


def fit_alpha_beta(cluster: Cluster, num_ranks: int) -> AlphaBetaFit:
    """Returns the latency and the bandwidth with which the textbook's formulas fit `num_ranks` ranks best.

    Raises ValueError when nothing but the backend was measured with that many.
    """
    found = [
        series for series in cluster.measurements if series.ranks == num_ranks and series.algorithm != BACKEND
    ]
    cells = [
        (get_algorithm(each.algorithm), *cell)
        for each in found
        for cell in zip(each.nbytes, each.seconds, strict=True)
    ]
    if not cells:
        raise ValueError(
            f"no algorithm but the backend was measured among {num_ranks} ranks; measure them too"
        )
    rows = [
        (each.seconds(num_ranks, nbytes, 1.0, inf) / took, each.seconds(num_ranks, nbytes, 0.0, 1.0) / took)
        for each, nbytes, took in cells
    ]
    latency, slowness = nonnegative_least_squares(np.array(rows), np.ones(len(rows)))
    rate = float(1 / slowness) if slowness > 0 else MAX_BYTES_PER_S
    guesses = [each.seconds(num_ranks, nbytes, float(latency), rate) / took for each, nbytes, took in cells]
    return AlphaBetaFit(
        float(latency), rate, median(exp(abs(log(max(guess, 1e-9)))) - 1 for guess in guesses)
    )


def fit_link(nbytes: Sequence[int], seconds: Sequence[float], num_bands: int) -> LinkCost:
    """Returns the link cost nearest to one series of times, in `num_bands` bands of about equally many sizes.

    `nbytes` rise. A band is fitted to its own sizes and to one on either side, so that neighbouring bands
    nearly meet. With one band it is the usual model of two parameters.
    """
    num_bands = max(1, min(num_bands, len(nbytes)))
    cuts = [len(nbytes) * number // num_bands for number in range(num_bands + 1)]
    bands = []
    for first, end in pairwise(cuts):
        near = range(max(0, first - 1), min(len(nbytes), end + 1))
        rows = np.array([[1 / seconds[at], nbytes[at] / seconds[at]] for at in near])
        latency, slowness = nonnegative_least_squares(rows, np.ones(len(rows)))
        upto = 0 if end == len(nbytes) else nbytes[end - 1]
        bands.append(
            SizeBand(
                upto,
                float(latency),
                float(min(MAX_BYTES_PER_S, 1 / slowness)) if slowness > 0 else MAX_BYTES_PER_S,
            )
        )
    return LinkCost(tuple(bands))
