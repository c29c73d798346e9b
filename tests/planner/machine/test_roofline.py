"""Seconds of products, attention, memory and gathers: what the formulas say, at their ends."""

from dataclasses import replace

import pytest

from meshwright.planner.machine.efficiency import Rates
from meshwright.planner.machine.machine import Machine, machine
from meshwright.planner.machine.roofline import attention, gathered, passed, product, sent

PERFECT = Rates(
    product=1,
    side=0,
    tail=0,
    attention=1,
    attention_back=1,
    memory=1,
    start_s=0,
    link=1,
    nic=1,
    latency_s=0,
    crowd=1e12,
)


def a100(count: int = 64, rates: Rates = PERFECT) -> Machine:
    return replace(machine("A100", count), rates=rates)


def test_a_large_product_runs_at_its_share_of_the_peak():
    seconds = product(a100(), 8192, 8192, 8192)
    assert seconds == pytest.approx(2 * 8192**3 / 312e12)
    assert product(a100(rates=replace(PERFECT, product=0.5)), 8192, 8192, 8192) == pytest.approx(2 * seconds)


def test_a_thin_product_is_bound_by_memory():
    assert product(a100(), 1, 4096, 4096) == pytest.approx(2 * (4096 + 4096 + 4096 * 4096) / 2039e9)


def test_a_short_inner_side_costs_what_its_rate_says():
    at = replace(PERFECT, side=128)
    assert product(a100(rates=at), 8192, 8192, 128) == pytest.approx(2 * 2 * 8192**2 * 128 / 312e12)


def test_the_last_wave_of_tiles_is_paid_for():
    """109 tiles on 108 units take as long as 216."""
    paid = replace(PERFECT, tail=1)
    full, one_more = (
        product(a100(rates=paid), 108 * 128, 256, 4096),
        product(a100(rates=paid), 109 * 128, 256, 4096),
    )
    assert one_more == pytest.approx(2 * full)


def test_nothing_takes_less_than_a_start():
    given = a100(rates=replace(PERFECT, start_s=1e-5))
    assert product(given, 1, 1, 1) >= 1e-5
    assert passed(given, 0, kernels=3) == pytest.approx(3e-5)
    assert product(given, 0, 5, 5) == 0


def test_backward_of_attention_takes_two_and_a_half_times_as_much():
    assert attention(a100(), 312e12, back=False) == pytest.approx(1)
    assert attention(a100(), 312e12, back=True) == pytest.approx(2.5)
    assert attention(
        a100(rates=replace(PERFECT, attention_old=0.5)), 312e12, back=False, kernel="flash1"
    ) == pytest.approx(2)


def test_ranks_of_one_host_gather_over_its_links():
    assert gathered(a100(), 8e9, 8, 1, 64) == pytest.approx(7 / 8 * 8e9 / 300e9)
    assert gathered(a100(), 8e9, 1, 1, 64) == 0


def test_a_ring_over_hosts_has_the_cards_of_all_its_ranks_on_one():
    """64 ranks side by side: eight on each host, so eight cards; with tensor ranks between them, fewer."""
    assert gathered(a100(), 64e9, 64, 1, 64) == pytest.approx(63 / 64 * 64e9 / (8 * 25e9))
    assert gathered(a100(), 64e9, 16, 4, 64) == pytest.approx(15 / 16 * 64e9 / (2 * 25e9))
    assert gathered(a100(), 64e9, 8, 8, 64) == pytest.approx(7 / 8 * 64e9 / 25e9)


def test_a_message_leaves_the_host_where_the_other_rank_does_not_lie_on_it():
    assert sent(a100(), 3e9, stride=4) == pytest.approx(3e9 / 300e9)
    assert sent(a100(), 3e9, stride=8) == pytest.approx(3e9 / 25e9)
