"""The judgement of the benchmark on made-up times: it holds where it must, and fails where it must."""

from dataclasses import replace
from itertools import product
from random import Random

from benchmarks.comm.allreduce_model import NAMES, cells_of_auto, decide, errors, half_fitted, halves, noise
from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.cost_model import all_reduce_seconds
from meshwright.plan.hardware.measured_cluster import AllReduceTiming
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

SIZES = tuple(1 << power for power in range(10, 23))
NETWORK = NetworkModel(
    tuple(RoundOverhead(number, 1e-4 * number) for number in (1, 2, 3)),
    intra_host=LinkCost((SizeBand(0, 1e-4, 2e9),)),
    busiest_rank=LinkCost((SizeBand(0, 0.0, 4e9),)),
    local_sum=LinkCost((SizeBand(0, 0.0, 3e9),)),
)


def timings(scatter: float = 0.0) -> list[AllReduceTiming]:
    """The times of `NETWORK`, the backend 2.5 times the ring; every sample up to `scatter` off."""
    random, found = Random(0), []
    for name, n, nbytes in product(NAMES, (2, 3), SIZES):
        took = all_reduce_seconds(get_algorithm("ring" if name == BACKEND else name), n, nbytes, NETWORK) * (
            2.5 if name == BACKEND else 1.0
        )
        samples = tuple(took * (1 + random.uniform(-scatter, scatter)) for _ in range(6))
        found.append(AllReduceTiming(name, n, nbytes, took, 0.0, samples))
    return found


def test_halves_are_the_samples_of_even_and_of_odd_sweeps():
    cell = AllReduceTiming("ring", 2, 1024, 2.0, 0.0, (1.0, 3.0, 1.0, 3.0))
    assert halves(cell) == (1.0, 3.0)
    assert round(noise(cell), 9) == round(noise(replace(cell, samples=cell.samples[::-1])), 9) == 2.0
    assert noise(replace(cell, samples=(1.0,))) == 0.0


def test_the_model_is_fitted_to_every_other_size_only():
    assert half_fitted("gloo", timings()).sizes == SIZES[::2]


def test_the_claim_holds_on_times_that_a_network_made():
    result = decide("gloo", timings(0.01))
    assert result.holds is True
    assert result.median < 0.05
    assert result.repeats == 6


def test_an_algorithm_that_is_not_as_predicted_makes_the_claim_fail():
    odd = [
        replace(cell, seconds=2 * cell.seconds)
        if cell.algorithm == "tree" and cell.nbytes in SIZES[1::2]
        else cell
        for cell in timings()
    ]
    result = decide("gloo", odd)
    assert result.holds is False
    assert result.median > 0.4


def test_noise_above_the_bar_leaves_the_claim_unresolved():
    random = Random(1)
    noisy = [replace(cell, seconds=cell.seconds * random.uniform(0.3, 3)) for cell in timings(0.9)]
    assert decide("gloo", noisy).holds != True  # noqa: E712  "unresolved" is true too


def test_a_pick_that_is_not_the_best_is_no_hit():
    measured = timings()
    cluster = half_fitted("gloo", measured)
    cells = {(cell.algorithm, cell.ranks, cell.nbytes): cell for cell in measured}
    assert all(cell["hit"] for cell in cells_of_auto(cluster, cells))
    quick = {
        key: replace(cell, samples=(1e-9,) * 6) if key[0] == "naive" else cell for key, cell in cells.items()
    }
    assert not any(cell["hit"] for cell in cells_of_auto(cluster, quick))


def test_both_errors_of_a_cell_are_returned():
    cells = timings()
    alone, corrected = errors(half_fitted("gloo", cells), cells[-1])
    assert 0 <= alone < 0.2
    assert 0 <= corrected < 0.2
