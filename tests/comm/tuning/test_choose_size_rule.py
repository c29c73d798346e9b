"""Selecting an algorithm by size, on networks where the best choice is known."""

from dataclasses import replace
from itertools import pairwise, product
from math import log

import pytest

from meshwright.comm.allreduce import BACKEND, FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.cost_model import all_reduce_seconds
from meshwright.comm.tuning.choose_size_rule import (
    SWITCH_COST,
    candidate_algorithms,
    cheapest_path,
    choose_rule,
    predict_all_reduce_s,
)
from meshwright.comm.tuning.network_fit import group_into_series
from meshwright.plan.hardware.measured_cluster import AllReduceTiming, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

SIZES = tuple(1 << power for power in range(10, 27))
PLAINER = [str(each) for each in FLAT_ALGORITHMS if str(each) != BACKEND]
FREE = LinkCost((SizeBand(0, 0.0, 1e15),))


def cluster(
    network: NetworkModel,
    ranks: tuple[int, ...],
    per_host: int = 0,
    *,
    backend: float = 0.0,
    names: list[str] = PLAINER,
) -> Cluster:
    """Measured exactly as `network` says; the backend takes `backend` times as long as a ring (0: it was not
    measured).
    """
    cells = [
        AllReduceTiming(
            name, n, nbytes, all_reduce_seconds(get_algorithm(name), n, nbytes, network, per_host)
        )
        for name, n, nbytes in product(names, ranks, SIZES)
    ]
    if backend:
        cells += [
            AllReduceTiming(
                BACKEND, n, s, backend * all_reduce_seconds(get_algorithm("ring"), n, s, network, per_host)
            )
            for n, s in product(ranks, SIZES)
        ]
    return Cluster("", "", "", "gloo", per_host, FitError(0, 0), network, group_into_series(cells))


def apart(latency_s: float, bytes_per_s: float) -> NetworkModel:
    """Every rank on a host of its own."""
    return NetworkModel(inter_host=LinkCost((SizeBand(0, latency_s, bytes_per_s),)))


def test_where_latency_is_all_the_fewest_rounds_win():
    choice = choose_rule(cluster(apart(1e-3, 1e13), (8,), 1), 8)
    assert set(choice.rule.algorithm_names) == {"one_shot"}
    shared = NetworkModel(inter_host=LinkCost((SizeBand(0, 1e-2, 1e8),)))
    assert choose_rule(cluster(shared, (8,), 1), 8).rule.algorithm_for(1024) in (
        "one_shot",
        "recursive_doubling",
    )


def test_where_the_rate_is_all_the_fewest_bytes_win():
    assert set(choose_rule(cluster(apart(1e-9, 1e6), (8,), 1), 8).rule.algorithm_names) <= {
        "ring",
        "recursive_halving",
    }


def test_between_them_short_messages_go_in_few_rounds_and_long_ones_in_few_bytes():
    rule = choose_rule(cluster(apart(1e-4, 1e9), (8,), 1), 8).rule
    assert rule.algorithm_for(1024) in ("recursive_doubling", "one_shot")
    assert rule.algorithm_for(64 << 20) == "recursive_halving"
    assert [nbytes for nbytes, _ in rule.thresholds] == sorted(nbytes for nbytes, _ in rule.thresholds)


def test_the_backend_is_chosen_where_it_was_measured_to_be_best_and_only_there():
    network = apart(1e-4, 1e9)
    assert choose_rule(cluster(network, (4,), 1, backend=0.1), 4).rule.algorithm_for(64 << 20) == BACKEND
    assert BACKEND not in choose_rule(cluster(network, (4,), 1, backend=9.0), 4).rule.algorithm_names
    assert BACKEND not in candidate_algorithms(cluster(network, (4,), 1), 4)


def test_the_same_cluster_gives_the_same_rule():
    found = cluster(apart(1e-4, 1e9), (3,), 1, backend=1.0)
    assert choose_rule(found, 3) == choose_rule(replace(found), 3)


def test_one_rank_has_nothing_to_choose():
    assert str(choose_rule(cluster(apart(1e-4, 1e9), (3,), 1), 1).rule) == BACKEND


def test_hosts_of_several_ranks_may_sum_inside_first():
    inside = NetworkModel(
        (RoundOverhead(1, 1e-6), RoundOverhead(2, 1e-6)),
        intra_host=FREE,
        busiest_rank=FREE,
        local_sum=FREE,
        inter_host=LinkCost((SizeBand(0, 1e-3, 1e8),)),
    )
    found = cluster(inside, (8,), 4, names=[*PLAINER, "hierarchical/4"])
    assert "hierarchical/4" in candidate_algorithms(found, 8)
    assert choose_rule(found, 8).rule.algorithm_for(64 << 20) == "hierarchical/4"
    assert "hierarchical/4" not in candidate_algorithms(found, 4)
    assert "hierarchical/4" not in candidate_algorithms(found, 6)


def test_a_number_of_ranks_that_was_not_measured_is_priced_by_the_model_and_said_to_be():
    found = cluster(apart(1e-4, 1e9), (2, 3), 1, backend=0.5)
    assert predict_all_reduce_s(found, "ring", 5, 1 << 20) == pytest.approx(
        all_reduce_seconds(get_algorithm("ring"), 5, 1 << 20, found.network, 1)
    )
    assert predict_all_reduce_s(found, BACKEND, 5, 1 << 20) == pytest.approx(
        0.5 * predict_all_reduce_s(found, "ring", 5, 1 << 20)
    )
    assert "5 ranks were not measured (only 2, 3)" in str(choose_rule(found, 5))
    assert "not measured" not in str(choose_rule(found, 3))


def test_what_was_measured_corrects_the_model_at_and_between_its_sizes():
    found = cluster(apart(1e-4, 1e9), (3,), 1)
    twice = replace(
        found,
        measurements=tuple(
            replace(each, seconds=tuple(2 * took for took in each.seconds)) for each in found.measurements
        ),
    )
    for nbytes in (512, 1024, 3000, 1 << 20, 1 << 30):
        assert predict_all_reduce_s(twice, "ring", 3, nbytes) == pytest.approx(
            2 * predict_all_reduce_s(found, "ring", 3, nbytes)
        )


def test_the_reason_names_sizes_and_times():
    said = str(choose_rule(cluster(apart(1e-4, 1e9), (4,), 1, backend=3.0), 4))
    assert "auto chose '" in said
    assert "64 MiB takes" in said
    assert "by backend)" in said


def test_the_reason_for_the_backend_names_the_fastest_other_algorithm():
    found = cluster(apart(1e-4, 1e9), (4,), 1, backend=0.1)
    said = str(choose_rule(found, 4))
    assert "auto chose 'backend'" in said
    others = {
        name: predict_all_reduce_s(found, name, 4, 64 << 20)
        for name in candidate_algorithms(found, 4)
        if name != BACKEND
    }
    fastest = min(others, key=lambda name: others[name])
    assert said.endswith(f"by backend ({1e3 * others[fastest]:.3g} ms by {fastest})")


def test_a_change_that_gains_less_than_its_price_is_not_made():
    gain = 1.04
    assert log(gain) < SWITCH_COST
    assert cheapest_path({"a": [1.0, gain, 1.0], "b": [gain, 1.0, gain]}) == ["a", "a", "a"]
    assert cheapest_path({"a": [1.0, 2.0, 2.0], "b": [2.0, 1.0, 1.0]}) == ["a", "b", "b"]
    assert cheapest_path({"a": [1.0, 1.0], "b": [1.0, 1.0]}) == ["a", "a"]


def test_the_path_through_the_sizes_is_the_cheapest_of_all():
    costs = {"a": [1.0, 3.0, 1.1, 2.0], "b": [1.5, 1.0, 1.2, 1.9], "c": [2.0, 1.1, 1.0, 1.8]}

    def price(path: tuple[str, ...]) -> float:
        changes = sum(one != other for one, other in pairwise(path))
        return SWITCH_COST * changes + sum(log(costs[name][place]) for place, name in enumerate(path))

    assert price(tuple(cheapest_path(costs))) == pytest.approx(min(map(price, product(costs, repeat=4))))
