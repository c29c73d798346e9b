"""The table of all-reduce algorithms: counts by the formulas of the lecture, and measured times beside the
formula.
"""

from fractions import Fraction
from io import StringIO

import pytest
from rich.console import Console

from meshwright.comm.allreduce import get_algorithm
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.report.bench.allreduce_cost_table import (
    FORMULA_ALGORITHMS,
    MAX_NUM_RANKS,
    allreduce_view,
    round_counts,
)

SIZES = (1024, 1 << 16, 1 << 22)


@pytest.mark.parametrize("n", range(2, MAX_NUM_RANKS + 1))
def test_rounds_and_bytes_are_those_of_the_lecture(n: int):
    few = (n - 1).bit_length()
    whole, ring = Fraction(n - 1), Fraction(2 * (n - 1), n)
    assert round_counts(get_algorithm("naive"), n) == (n, whole, n * whole)
    assert round_counts(get_algorithm("reduce_broadcast"), n) == (2, whole, 2 * whole)
    assert round_counts(get_algorithm("ring"), n) == (2 * (n - 1), ring, 2 * whole)
    assert round_counts(get_algorithm("one_shot"), n) == (1, whole, n * whole)
    assert round_counts(get_algorithm("recursive_halving"), n) == (2 * few, ring, 2 * whole)
    assert round_counts(get_algorithm("tree"), n) == (2 * few, few, 2 * whole)
    if n == 1 << few:
        assert round_counts(get_algorithm("recursive_doubling"), n) == (few, few, n * few)


def test_the_table_of_formulas_shows_counts_then_times_then_what_is_loose():
    times = [
        AllReduceSeries(
            name, 3, SIZES, tuple(get_algorithm(name).seconds(3, s, 1e-4, 1e9) for s in SIZES), (0.0,) * 3
        )
        for name in FORMULA_ALGORITHMS
    ]
    network = NetworkModel(inter_host=LinkCost((SizeBand(0, 1e-4, 1e9),)))
    cluster = Cluster(
        "",
        "m",
        "2.13",
        "gloo",
        1,
        FitError(0, 0),
        network,
        (*times, AllReduceSeries("backend", 3, SIZES, (1e-3,) * 3, (0.0,) * 3)),
    )
    console = Console(width=140, record=True, file=StringIO())
    console.print(allreduce_view(cluster))
    text = console.export_text()
    assert "2/1/2  4/1.33/4" in text
    assert "a = 100 us and B = 1.00 GB/s" in text
    exact = get_algorithm("ring").seconds(3, 1024, 1e-4, 1e9) * 1e3
    assert f"{exact:.3g} ({exact:.3g})" in text
    assert "the median error is 0 %" in text
    assert '"Halving is O(log n)": in rounds.' in text
    assert text.index("n =") < text.index("a = 100 us") < text.index("Common claims, made precise")
