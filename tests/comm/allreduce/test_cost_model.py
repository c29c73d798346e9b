"""The price of an all-reduce from its rounds: by hand for a few, by the law for all."""

import pytest

from meshwright.comm.allreduce import FLAT_ALGORITHMS, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import cached_num_sent
from meshwright.comm.allreduce.cost_model import all_reduce_seconds, round_loads
from meshwright.comm.allreduce.hierarchical import HierarchicalAllReduce
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

FREE = LinkCost((SizeBand(0, 0.0, 1e15),))


def link(latency_s: float, bytes_per_s: float) -> LinkCost:
    return LinkCost((SizeBand(0, latency_s, bytes_per_s),))


def test_the_rounds_of_a_ring_are_of_two_kinds_however_many_ranks():
    found = round_loads(get_algorithm("ring"), 5)
    assert sum(count for _, count in found) == 8
    assert len(found) == 2
    assert {demand.local_sum for demand, _ in found} == {0.2, 0.0}
    assert all(
        demand.num_receivers == 5 and demand.intra_host == ((0.2, 5),) and demand.busiest_rank == ((0.2, 2),)
        for demand, _ in found
    )


def test_root_sends_all_messages_through_its_own_host():
    (gather, _), (hand_out, _) = round_loads(get_algorithm("reduce_broadcast"), 3)
    assert (gather.num_receivers, gather.busiest_rank, gather.local_sum) == (1, ((1.0, 2),), 2.0)
    assert (hand_out.num_receivers, hand_out.busiest_rank, hand_out.local_sum) == (2, ((1.0, 2),), 0.0)


def test_what_goes_through_one_host_is_what_all_ranks_send():
    for algorithm in FLAT_ALGORITHMS:
        for size in (2, 3, 5, 8):
            moved = sum(
                count * share * number
                for demand, count in round_loads(algorithm, size)
                for share, number in demand.intra_host
            )
            sent = sum(cached_num_sent(algorithm, size, index, 840) for index in range(size))
            assert moved * 840 == pytest.approx(sent), (algorithm, size)


def test_a_price_is_the_sum_of_its_parts():
    network = NetworkModel(
        (RoundOverhead(3, 1.0),),
        intra_host=link(10.0, 1.0),
        busiest_rank=link(0.0, 0.1),
        local_sum=link(0.0, 0.01),
    )
    # a round of a ring of 3 with 3 bytes: 1 crowd, 3 messages of a byte, 2 of the busiest rank, one byte
    # added in half of them
    each = 1.0 + 3 * (10.0 + 1.0) + 2 * 10.0
    assert all_reduce_seconds(get_algorithm("ring"), 3, 3, network) == pytest.approx(4 * each + 2 * 100.0)


def test_messages_between_hosts_share_the_network_card():
    network = NetworkModel(
        (RoundOverhead(2, 0.0),),
        intra_host=FREE,
        busiest_rank=FREE,
        local_sum=FREE,
        inter_host=link(1.0, 1.0),
    )
    # 4 ranks on 2 hosts. Ring: one chunk leaves each host in each of 6 rounds. Doubling: both ranks send all
    # in one round of two
    assert all_reduce_seconds(get_algorithm("ring"), 4, 8, network, 2) == pytest.approx(6 * (1.0 + 2.0))
    assert all_reduce_seconds(get_algorithm("recursive_doubling"), 4, 8, network, 2) == pytest.approx(
        1.0 + 16.0
    )
    assert all_reduce_seconds(HierarchicalAllReduce(2), 4, 8, network, 2) == pytest.approx(
        2 * (1.0 + 4.0), rel=1e-6
    )


def test_in_a_round_the_slower_of_inside_and_between_decides():
    slow_inside = NetworkModel(
        (RoundOverhead(1, 50.0), RoundOverhead(2, 50.0)),
        intra_host=FREE,
        busiest_rank=FREE,
        local_sum=FREE,
        inter_host=link(1.0, 1e15),
    )
    assert all_reduce_seconds(get_algorithm("ring"), 4, 8, slow_inside, 2) == pytest.approx(
        6 * 50.0, rel=1e-6
    )
    slow_between = NetworkModel(
        (RoundOverhead(1, 1.0), RoundOverhead(2, 1.0)),
        intra_host=FREE,
        busiest_rank=FREE,
        local_sum=FREE,
        inter_host=link(50.0, 1e15),
    )
    assert all_reduce_seconds(get_algorithm("ring"), 4, 8, slow_between, 2) == pytest.approx(
        6 * 50.0, rel=1e-6
    )


def test_a_network_without_a_cost_between_hosts_cannot_estimate_ranks_on_two():
    with pytest.raises(ValueError, match="across hosts"):
        all_reduce_seconds(
            get_algorithm("ring"),
            4,
            8,
            NetworkModel((RoundOverhead(1, 1.0),), intra_host=FREE, busiest_rank=FREE),
            2,
        )


def test_one_rank_costs_nothing():
    assert all(
        all_reduce_seconds(algorithm, 1, 1024, NetworkModel(intra_host=FREE, busiest_rank=FREE)) == 0
        for algorithm in FLAT_ALGORITHMS
    )
