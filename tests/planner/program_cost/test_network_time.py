"""What messages cost: by what was measured of a cluster, and by the rates of a kind of device."""

import pytest

from meshwright.comm.tuning.autoselect import predicted
from meshwright.plan.hardware.network_model import (
    AllReduceSeries,
    Cluster,
    FitError,
    LinkCost,
    NetworkModel,
    SizeBand,
)
from meshwright.plan.step.action import Transfer
from meshwright.planner.machine.machine import machine
from meshwright.planner.machine.roofline import gathered, sent
from meshwright.planner.program_cost.network_time import ByRates, Measured, Unknown, message

LINK = LinkCost((SizeBand(0, 1e-5, 1e9),))
NETWORK = NetworkModel((), LINK, LINK, None)
SIZES = (1024, 1 << 20)
CLUSTER = Cluster(
    1,
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
    assert Measured(CLUSTER).seconds(move("all_reduce", 1 << 20), (0, 1)) == predicted(
        CLUSTER, "backend", 2, 1 << 20
    )
    assert Measured(CLUSTER).seconds(move("all_reduce", 1 << 20, "ring"), (0, 1)) == predicted(
        CLUSTER, "ring", 2, 1 << 20
    )


@pytest.mark.parametrize(
    "wire", [Measured(CLUSTER), ByRates(machine("h100", 8))], ids=["measured", "by its kind"]
)
def test_a_scatter_of_sums_and_a_gather_are_a_sum(wire: Measured | ByRates):
    whole = wire.seconds(move("all_reduce", 1 << 20), (0, 1))
    parts = (
        wire.seconds(move("reduce_scatter", 1 << 20), (0, 1)),
        wire.seconds(move("all_gather", 1 << 19), (0, 1)),
    )
    assert sum(parts) == pytest.approx(whole)
    assert parts[0] == pytest.approx(parts[1])


def test_a_message_has_the_price_of_the_host_and_of_its_ranks():
    assert Measured(CLUSTER).seconds(move("send", 10**6), (0, 3)) == pytest.approx(2 * (1e-5 + 1e-3))


def test_a_shift_moves_what_half_a_sum_of_as_many_bytes_per_rank_does():
    assert (
        Measured(CLUSTER).seconds(move("shift", 1 << 19), (0, 1))
        == predicted(CLUSTER, "backend", 2, 1 << 20) / 2
    )


def test_between_hosts_the_card_decides():
    network = NetworkModel((), LINK, LINK, None, LinkCost((SizeBand(0, 1e-3, 1e8),)))
    assert message(network, 10**6, apart=True) == pytest.approx(1e-3 + 1e-2)


def test_devices_of_a_kind_have_its_links():
    given = machine("h100", 16)
    assert ByRates(given).seconds(move("all_gather", 1 << 20), range(4)) == gathered(given, 4 << 20, 4, 1, 16)
    assert ByRates(given).seconds(move("send", 1 << 20), (0, 8)) == sent(given, 1 << 20, 8)


@pytest.mark.parametrize("wire", [Measured(CLUSTER), ByRates(machine("h100", 8)), Unknown()])
def test_nobody_sends_anything_alone(wire: Measured | ByRates | Unknown):
    assert wire.seconds(move("all_reduce", 1 << 20), (0,)) == 0
