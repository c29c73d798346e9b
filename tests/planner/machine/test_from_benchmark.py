"""Machine rates from measurements of one device and of some links; inconsistent measurements are refused."""

from dataclasses import replace
from math import log2

import pytest

from meshwright.plan.hardware.measured_cluster import AllReduceSeries, Cluster, FitError
from meshwright.plan.hardware.network_model import LinkCost, NetworkModel, RoundOverhead, SizeBand
from meshwright.plan.job.errors import PlanError
from meshwright.planner.machine.from_benchmark import (
    measured_device,
    measured_rates,
    streaming_rate,
    with_measured_links,
)
from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.machine.machine_rates import load_rates
from meshwright.planner.machine.roofline import all_gather_seconds, attention_seconds, matmul_seconds
from tests.planner.machine.synthetic_device import FILL, RATE, profile

SIZES = tuple(1024 << shift for shift in range(0, 17, 2))
LATENCY_S, LINK, CARD = 2e-5, 8e9, 1e9
PRICE = LinkCost((SizeBand(0, 1e-5, 4e9),))
INSIDE = NetworkModel((RoundOverhead(1, 1e-5),), intra_host=PRICE, busiest_rank=PRICE)


def half(ranks: int, nbytes: float, rate: float, latency_s: float) -> float:
    return latency_s * log2(ranks) + (ranks - 1) / ranks * nbytes / rate


def series(ranks: int, rate: float, latency_s: float) -> AllReduceSeries:
    seconds = tuple(2 * half(ranks, nbytes, rate, latency_s) for nbytes in SIZES)
    return AllReduceSeries("backend", ranks, SIZES, seconds, (0.0,) * len(SIZES))


def cluster(
    *measured: AllReduceSeries,
    per_host: int = 0,
    network: NetworkModel = INSIDE,
    name: str = "Abacus 7, 4 cores",
) -> Cluster:
    return Cluster("", name, "2.13", "gloo", per_host, FitError(0.1, 0.1), network, measured)


def own(count: int, **known: float) -> Machine:
    found = profile()
    device = replace(measured_device(found), **known)
    return Machine(device, count, measured_rates(found, device))


def test_the_rates_of_a_measured_device_price_its_products_and_its_attention():
    given = own(1)
    assert given.rates.half_rate_dim == pytest.approx(FILL, rel=0.5)
    assert given.rates.matmul * given.peak_flops("bfloat16") == pytest.approx(RATE, rel=0.1)
    for size in ((1024, 1024, 1024), (2048, 512, 4096), (4096, 4096, 128)):
        assert matmul_seconds(given, *size) == pytest.approx(
            profile().matmul_seconds(size[0], size[1], size[2]), rel=0.2
        )
    flops = 4 * 2 * 4 * 512 * 512 * 128
    for back in (False, True):
        seconds = profile().attention_seconds((2, 4, 512, 512, 128), "bfloat16", backward=back)
        assert attention_seconds(given, flops, backward=back) == pytest.approx(seconds, rel=0.3)


def test_the_facts_of_a_known_device_stay_and_its_shares_are_those_measured():
    found = profile("NVIDIA H100 80GB HBM3", "cuda", 600e12)
    device = measured_device(found)
    rates = measured_rates(found, device)
    assert device == make_machine("H100", 1).device
    assert rates.matmul * device.flops["bfloat16"] == pytest.approx(600e12, rel=0.2)
    assert (rates.residual_passes, rates.grad_reduce_overlap) == (
        load_rates("H100").residual_passes,
        load_rates("H100").grad_reduce_overlap,
    )
    assert rates.memory * device.memory_rate == pytest.approx(600e12 / 20)
    assert streaming_rate(profile()) == pytest.approx(12.5e9)  # of a CPU: what caches hold counts too


def test_a_device_that_nobody_measured_in_16_bits_is_refused():
    found = replace(profile(), matmuls=tuple(each for each in profile().matmuls if each.dtype == "float32"))
    with pytest.raises(
        PlanError, match="matmuls were measured in float32 only, and the search needs a 16-bit dtype"
    ):
        measured_rates(found, measured_device(found))


def test_the_rate_and_latency_of_links_are_found_again():
    given, notes = with_measured_links(
        own(4), cluster(series(2, LINK, LATENCY_S), series(4, LINK, LATENCY_S))
    )
    assert given.devices_per_host == 4
    for nbytes in (1 << 12, 1 << 20, 1 << 26):
        assert all_gather_seconds(given, nbytes, 4, 1, 4) == pytest.approx(
            half(4, nbytes, LINK, LATENCY_S), rel=0.2
        )
    assert given.link_rate == pytest.approx(LINK, rel=0.05)
    assert len(notes) == 1
    assert "among 2, 4 ranks" in notes[0]


def test_links_between_hosts_are_those_of_a_device_of_which_a_host_has_several():
    found = cluster(
        series(2, LINK, LATENCY_S),
        series(8, 4 * CARD, 2 * LATENCY_S),
        per_host=4,
        network=NetworkModel(inter_host=PRICE),
    )
    given, notes = with_measured_links(own(16), found)
    assert given.devices_per_host == 4
    assert given.nic_rate(2) == pytest.approx(CARD, rel=0.1)
    assert all_gather_seconds(given, 1 << 26, 8, 1, 8) == pytest.approx(
        half(8, 1 << 26, 4 * CARD, 2 * LATENCY_S), rel=0.1
    )
    assert "at most 8 ranks were measured: links of 16 are assumed to be as fast" in notes
    assert any("among 8 ranks on hosts of 4" in note for note in notes)


def test_one_host_that_was_measured_says_nothing_of_links_between_hosts():
    found = cluster(series(2, LINK, LATENCY_S))
    with pytest.raises(
        PlanError, match="16 devices on hosts of 4, but links between hosts were not measured"
    ):
        with_measured_links(own(16, devices_per_host=4), found)
    _, notes = with_measured_links(own(16, devices_per_host=4, nic_rate=25e9), found)
    assert any("links between hosts were not measured: 25 GB/s per device" in note for note in notes)


def test_hosts_that_were_measured_only_together_need_a_link_inside():
    found = cluster(series(8, CARD, LATENCY_S), per_host=4, network=NetworkModel(inter_host=PRICE))
    with pytest.raises(PlanError, match="links inside a host were not measured"):
        with_measured_links(own(8), found)
    assert with_measured_links(own(8, link_rate=5e9), found)[0].device.link_rate == 5e9


def test_links_of_another_machine_are_refused():
    with pytest.raises(
        PlanError,
        match=r"the links were measured on Abacus 7, 4 cores [(]over gloo[)], but the devices are H100",
    ):
        with_measured_links(make_machine("h100", 8), cluster(series(2, LINK, LATENCY_S)))
    taken, _ = with_measured_links(
        make_machine("h100", 8), cluster(series(2, LINK, LATENCY_S), name="NVIDIA H100 80GB HBM3 x 8")
    )
    assert taken.link_rate == pytest.approx(LINK, rel=0.05)
