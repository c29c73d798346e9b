"""The cost of a message: bands of size, and the overhead of ranks on one host."""

from math import inf

import pytest

from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand

SHORT, LONG = SizeBand(1024, 1e-5, 1e8), SizeBand(0, 5e-5, 1e9)
LINK = LinkCost((SHORT, LONG))


def test_a_message_costs_the_latency_of_its_band_and_its_bytes_at_the_rate_of_its_band():
    assert LINK.seconds(512) == pytest.approx(1e-5 + 512 / 1e8)
    assert LINK.seconds(10**6) == pytest.approx(5e-5 + 1e-3)


def test_the_bound_of_a_band_belongs_to_it():
    assert LINK.seconds(1024) == pytest.approx(SHORT.seconds(1024))
    assert LINK.seconds(1025) == pytest.approx(LONG.seconds(1025))


def test_a_longer_message_is_never_cheaper():
    falling = LinkCost((SizeBand(1000, 1e-3, 1e6), SizeBand(0, 0.0, 1e9)))
    costs = [falling.seconds(nbytes) for nbytes in (1, 999, 1000, 1001, 10**6, 10**7)]
    assert costs == sorted(costs)
    assert falling.seconds(1001) == falling.seconds(1000)


@pytest.mark.parametrize(
    ("bands", "message"),
    [
        ((), "bands up to []"),
        ((SHORT,), "bands up to [1024]"),
        ((LONG, LONG), "bands up to [0, 0]"),
        ((SizeBand(2048, 0, 1), SHORT, LONG), "bands up to [2048, 1024, 0]"),
        ((SizeBand(0, -1.0, 1.0),), "a latency of -1.0 s"),
        ((SizeBand(0, inf, 1.0),), "a latency of inf s"),
        ((SizeBand(0, 0.0, 0.0),), "a rate of 0.0"),
    ],
)
def test_bad_bands_are_reported(bands: tuple[SizeBand, ...], message: str):
    (diagnostic,) = LinkCost(bands).diagnostics("network.host")
    assert message in diagnostic.problem
    assert diagnostic.location.startswith("network.host")


def test_overheads_are_interpolated():
    network = NetworkModel(
        (RoundOverhead(1, 1e-4), RoundOverhead(2, 2e-4), RoundOverhead(4, 8e-4)),
        intra_host=LINK,
        busiest_rank=LINK,
    )
    assert network.round_overhead_s(0) == 0
    assert [network.round_overhead_s(number) for number in (1, 2, 3, 4)] == pytest.approx(
        [1e-4, 2e-4, 5e-4, 8e-4]
    )


def test_overheads_are_extrapolated_with_the_mean_slope():
    network = NetworkModel(
        (RoundOverhead(2, 2e-4), RoundOverhead(4, 8e-4)), intra_host=LINK, busiest_rank=LINK
    )
    assert network.round_overhead_s(6) == pytest.approx(14e-4)
    assert network.round_overhead_s(1) == pytest.approx(2e-4)
    flat = NetworkModel((RoundOverhead(2, 2e-4), RoundOverhead(4, 1e-4)), intra_host=LINK, busiest_rank=LINK)
    assert flat.round_overhead_s(100) == pytest.approx(1e-4)


def test_every_error_of_a_network_is_reported():
    bad = NetworkModel((RoundOverhead(2, -1.0), RoundOverhead(1, 1.0)), inter_host=LinkCost(()))
    assert [diagnostic.location for diagnostic in bad.diagnostics("network")] == [
        "network.inter_host",
        "network.round_overheads",
        "network.round_overheads.0.seconds",
    ]
    (diagnostic,) = NetworkModel().diagnostics("network")
    assert "bench network" in diagnostic.fix
