"""Message costs: from measurements of a cluster, and from the rates of a kind of device."""

import pytest

from meshwright.comm.tuning.choose_size_rule import predict_all_reduce_s
from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, SizeBand
from meshwright.plan.step.program import Transfer
from meshwright.planner.machine.machine import make_machine
from meshwright.planner.machine.roofline import all_gather_seconds, exchange_seconds, send_seconds
from meshwright.planner.program_cost.network_time import (
    MeasuredNetworkTime,
    RatedNetworkTime,
    UnknownNetworkTime,
    message_seconds,
)

LINK = LinkCost((SizeBand(0, 1e-5, 1e9),))
NETWORK = NetworkModel((), LINK, LINK, None)
SIZES = (1024, 1 << 20)
CLUSTER = Cluster(
    "",
    "x",
    "",
    "gloo",
    0,
    FitError(0, 0),
    NETWORK,
    (AllReduceSeries("backend", 2, SIZES, (1e-4, 2e-3), (0, 0)),),
)


def move(collective: str, nbytes: int, algorithm: str = "backend") -> Transfer:
    return Transfer(collective, ("tp",), nbytes, algorithm)


def test_a_sum_takes_what_was_measured():
    assert MeasuredNetworkTime(CLUSTER).seconds(move("all_reduce", 1 << 20), (0, 1)) == predict_all_reduce_s(
        CLUSTER, "backend", 2, 1 << 20
    )
    assert MeasuredNetworkTime(CLUSTER).seconds(
        move("all_reduce", 1 << 20, "ring"), (0, 1)
    ) == predict_all_reduce_s(CLUSTER, "ring", 2, 1 << 20)


@pytest.mark.parametrize(
    "wire",
    [MeasuredNetworkTime(CLUSTER), RatedNetworkTime(make_machine("h100", 8))],
    ids=["measured", "by its kind"],
)
def test_a_scatter_of_sums_and_a_gather_are_a_sum(wire: MeasuredNetworkTime | RatedNetworkTime):
    whole = wire.seconds(move("all_reduce", 1 << 20), (0, 1))
    parts = (
        wire.seconds(move("reduce_scatter", 1 << 20), (0, 1)),
        wire.seconds(move("all_gather", 1 << 19), (0, 1)),
    )
    assert sum(parts) == pytest.approx(whole)
    assert parts[0] == pytest.approx(parts[1])


def test_a_message_has_the_price_of_the_host_and_of_its_ranks():
    assert MeasuredNetworkTime(CLUSTER).seconds(move("send", 10**6), (0, 3)) == pytest.approx(
        2 * (1e-5 + 1e-3)
    )


def test_a_shift_moves_what_half_a_sum_of_as_many_bytes_per_rank_does():
    assert (
        MeasuredNetworkTime(CLUSTER).seconds(move("shift", 1 << 19), (0, 1))
        == predict_all_reduce_s(CLUSTER, "backend", 2, 1 << 20) / 2
    )


def test_between_hosts_the_network_card_decides():
    network = NetworkModel((), LINK, LINK, None, LinkCost((SizeBand(0, 1e-3, 1e8),)))
    assert message_seconds(network, 10**6, crosses_hosts=True) == pytest.approx(1e-3 + 1e-2)


def test_devices_of_a_kind_have_its_links():
    given = make_machine("h100", 16)
    assert RatedNetworkTime(given).seconds(move("all_gather", 1 << 20), range(4)) == all_gather_seconds(
        given, 4 << 20, 4, 1, 16
    )
    assert RatedNetworkTime(given).seconds(move("send", 1 << 20), (0, 8)) == send_seconds(given, 1 << 20, 8)


@pytest.mark.parametrize(
    "wire", [MeasuredNetworkTime(CLUSTER), RatedNetworkTime(make_machine("h100", 8)), UnknownNetworkTime()]
)
def test_a_single_rank_sends_nothing(wire: MeasuredNetworkTime | RatedNetworkTime | UnknownNetworkTime):
    assert wire.seconds(move("all_reduce", 1 << 20), (0,)) == 0


@pytest.mark.parametrize("collective", ["all_to_all", "all_to_all_v"])
def test_an_exchange_across_hosts_is_none_of_a_ring(collective: str):
    given = make_machine("h100", 16)
    wire, ranks, nbytes = RatedNetworkTime(given), range(16), 1 << 26
    put_in = nbytes if collective == "all_to_all" else nbytes * 15 // 16
    seconds = wire.seconds(move(collective, put_in), ranks)
    assert seconds == pytest.approx(exchange_seconds(given, nbytes, 16, 1, 16))
    # half of what a rank sends leaves its host by its own card; a ring sends all of it by those of the host
    ring = wire.seconds(move("all_gather", nbytes // 16), ranks)
    assert ring == pytest.approx(all_gather_seconds(given, nbytes, 16, 1, 16))
    assert seconds > 1.5 * ring
    inside = wire.seconds(move(collective, put_in), range(8))
    assert inside < seconds
