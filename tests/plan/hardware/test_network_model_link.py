"""The price of a message: bands of its size, and what ranks on a host cost each other."""

from math import inf

import pytest

from meshwright.plan.hardware.network_model import Band, Crowd, Link, Network

SHORT, LONG = Band(1024, 1e-5, 1e8), Band(0, 5e-5, 1e9)
LINK = Link((SHORT, LONG))


def test_a_message_costs_the_latency_of_its_band_and_its_bytes_at_the_rate_of_its_band():
    assert LINK.seconds(512) == pytest.approx(1e-5 + 512 / 1e8)
    assert LINK.seconds(10**6) == pytest.approx(5e-5 + 1e-3)


def test_the_bound_of_a_band_belongs_to_it():
    assert LINK.seconds(1024) == pytest.approx(SHORT.seconds(1024))
    assert LINK.seconds(1025) == pytest.approx(LONG.seconds(1025))


def test_a_longer_message_is_never_cheaper():
    falling = Link((Band(1000, 1e-3, 1e6), Band(0, 0.0, 1e9)))
    costs = [falling.seconds(nbytes) for nbytes in (1, 999, 1000, 1001, 10**6, 10**7)]
    assert costs == sorted(costs)
    assert falling.seconds(1001) == falling.seconds(1000)


@pytest.mark.parametrize(
    ("bands", "said"),
    [
        ((), "bands up to []"),
        ((SHORT,), "bands up to [1024]"),
        ((LONG, LONG), "bands up to [0, 0]"),
        ((Band(2048, 0, 1), SHORT, LONG), "bands up to [2048, 1024, 0]"),
        ((Band(0, -1.0, 1.0),), "a latency of -1.0 s"),
        ((Band(0, inf, 1.0),), "a latency of inf s"),
        ((Band(0, 0.0, 0.0),), "a rate of 0.0"),
    ],
)
def test_bad_bands_are_told(bands: tuple[Band, ...], said: str):
    (fault,) = Link(bands).faults("network.host")
    assert said in fault.what
    assert fault.where.startswith("network.host")


def test_a_crowd_between_two_measured_ones_costs_something_between():
    network = Network((Crowd(1, 1e-4), Crowd(2, 2e-4), Crowd(4, 8e-4)), host=LINK, rank=LINK)
    assert network.crowd_s(0) == 0
    assert [network.crowd_s(number) for number in (1, 2, 3, 4)] == pytest.approx([1e-4, 2e-4, 5e-4, 8e-4])


def test_a_larger_crowd_than_any_measured_goes_on_with_the_mean_slope():
    network = Network((Crowd(2, 2e-4), Crowd(4, 8e-4)), host=LINK, rank=LINK)
    assert network.crowd_s(6) == pytest.approx(14e-4)
    assert network.crowd_s(1) == pytest.approx(2e-4)
    flat = Network((Crowd(2, 2e-4), Crowd(4, 1e-4)), host=LINK, rank=LINK)
    assert flat.crowd_s(100) == pytest.approx(1e-4)


def test_every_fault_of_a_network_is_told():
    bad = Network((Crowd(2, -1.0), Crowd(1, 1.0)), between=Link(()))
    assert [fault.where for fault in bad.faults("network")] == [
        "network.between",
        "network.crowds",
        "network.crowds.0.seconds",
    ]
    (fault,) = Network().faults("network")
    assert "bench comm" in fault.fix
