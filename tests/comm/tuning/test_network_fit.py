"""The fit recovers the network that produced the times, and never has a negative parameter."""

from itertools import product

import pytest

from meshwright.comm.allreduce import BACKEND, FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.cost_model import all_reduce_seconds
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.comm.tuning.network_fit import (
    BAND_LIMITS,
    fit_alpha_beta,
    fit_link,
    fit_network,
    group_into_series,
    with_fit,
)
from meshwright.plan.hardware.measured_cluster import AllReduceTiming, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

SIZES = tuple(1 << power for power in range(10, 25))
NAMES = [str(each) for each in FLAT_ALGORITHMS if str(each) != BACKEND]


def bands(*figures: tuple[float, float]) -> LinkCost:
    return LinkCost(tuple(SizeBand(upto, *each) for upto, each in zip(BAND_LIMITS, figures, strict=True)))


TRUE = NetworkModel(
    (RoundOverhead(1, 1e-4), RoundOverhead(2, 2e-4), RoundOverhead(3, 4e-4), RoundOverhead(4, 7e-4)),
    intra_host=bands((1e-4, 1e9), (1e-4, 2e9), (2e-4, 3e9), (3e-4, 2e9)),
    busiest_rank=bands((0, 3e9), (0, 4e9), (0, 5e9), (0, 4e9)),
    local_sum=bands((0, 2e9), (0, 3e9), (0, 3e9), (0, 2e9)),
)


def timings(
    network: NetworkModel, ranks: tuple[int, ...], per_host: int = 0, names: list[str] = NAMES
) -> list[AllReduceTiming]:
    cells = product(names, ranks, SIZES)
    return [
        AllReduceTiming(
            name, n, nbytes, all_reduce_seconds(get_algorithm(name), n, nbytes, network, per_host)
        )
        for name, n, nbytes in cells
    ]


def cluster(network: NetworkModel, measured: list[AllReduceTiming]) -> Cluster:
    return Cluster("", "", "", "gloo", 0, FitError(0, 0), network, group_into_series(measured))


def test_times_that_a_network_made_are_given_back_by_the_network_that_is_fitted():
    found = fit_network(timings(TRUE, (2, 3, 4)))
    for cell in timings(TRUE, (2, 3, 4, 6)):
        guess = all_reduce_seconds(get_algorithm(cell.algorithm), cell.ranks, cell.nbytes, found)
        assert guess == pytest.approx(cell.seconds, rel=0.03 if cell.ranks < 5 else 0.15), cell


def test_the_link_between_hosts_is_found_beside_the_one_inside():
    network = NetworkModel(
        TRUE.round_overheads,
        TRUE.intra_host,
        TRUE.busiest_rank,
        TRUE.local_sum,
        inter_host=bands((3e-3, 1e8), (3e-3, 1e8), (4e-3, 1e8), (4e-3, 1e8)),
    )
    names = [*NAMES, str(HierarchicalAllReduce(2))]
    found = fit_network(timings(network, (4,), 2, names), 2)
    assert found.inter_host is not None
    assert found.inter_host.bands[-1].bytes_per_s == pytest.approx(1e8, rel=0.05)
    guess = all_reduce_seconds(get_algorithm("hierarchical/2"), 4, 1 << 20, found, 2)
    assert guess == pytest.approx(
        all_reduce_seconds(get_algorithm("hierarchical/2"), 4, 1 << 20, network, 2), rel=0.05
    )


def test_one_rank_per_host_gives_a_link_between_and_none_inside():
    network = NetworkModel(
        local_sum=TRUE.local_sum, inter_host=bands((1e-3, 1e8), (1e-3, 1e8), (1e-3, 1e8), (1e-3, 1e8))
    )
    found = fit_network(timings(network, (2, 3), 1), 1)
    assert (found.intra_host, found.busiest_rank, found.round_overheads) == (None, None, ())
    assert list(found.diagnostics("network")) == []


def test_a_band_in_which_no_message_falls_is_left_out():
    few = [cell for cell in timings(TRUE, (2, 3)) if cell.nbytes <= 4096]
    link = fit_network(few).intra_host
    assert link is not None
    assert [band.max_nbytes for band in link.bands] == [0]


def test_the_backend_alone_cannot_be_fitted():
    with pytest.raises(ValueError, match="only the backend"):
        fit_network([AllReduceTiming(BACKEND, 2, 1024, 1e-3)])


def test_the_errors_are_those_of_sizes_that_were_not_fitted():
    good = with_fit(cluster(NetworkModel(), []), timings(TRUE, (2, 3)))
    assert good.fit_error.model < 0.05
    assert good.fit_error.corrected < 0.05
    broken = [
        AllReduceTiming(each.algorithm, each.ranks, each.nbytes, each.seconds * (3 if number % 2 else 1))
        for number, each in enumerate(timings(TRUE, (2, 3)))
    ]
    assert with_fit(cluster(NetworkModel(), []), broken).fit_error.model > 0.2


def test_latency_and_bandwidth_of_textbook_times_are_recovered():
    made = [
        AllReduceTiming(name, 3, nbytes, get_algorithm(name).seconds(3, nbytes, 2e-4, 1e9))
        for name in NAMES
        for nbytes in SIZES
    ]
    found = fit_alpha_beta(cluster(TRUE, made), 3)
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((2e-4, 1e9))
    assert found.error < 1e-6


def test_bands_follow_a_change_of_protocol_that_one_latency_and_bandwidth_cannot():
    took = [1e-5 + nbytes / 1e8 if nbytes <= 1 << 16 else 1e-3 + nbytes / 1e10 for nbytes in SIZES]

    def worst(num_bands: int) -> float:
        link = fit_link(SIZES, took, num_bands)
        return max(abs(link.seconds(nbytes) / true - 1) for nbytes, true in zip(SIZES, took, strict=True))

    assert worst(4) < worst(1) / 2
    assert len(fit_link(SIZES, took, 4).bands) == 4
    assert list(fit_link(SIZES, took, 4).diagnostics("")) == []
