"""Time of products, attention, memory operations and gathers: the formulas at their limits."""

from dataclasses import replace

import pytest

from meshwright.planner.machine.machine import Machine, make_machine
from meshwright.planner.machine.machine_rates import MachineRates
from meshwright.planner.machine.roofline import (
    all_gather_seconds,
    attention_seconds,
    exchange_seconds,
    matmul_seconds,
    memory_op_seconds,
    send_seconds,
)

PERFECT = MachineRates(
    matmul=1,
    half_rate_dim=0,
    wave_tail=0,
    attention=1,
    attention_backward=1,
    memory=1,
    kernel_start_s=0,
    link=1,
    nic=1,
    latency_s=0,
    fabric_half_hosts=1e12,
)


def a100(count: int = 64, rates: MachineRates = PERFECT) -> Machine:
    return replace(make_machine("A100", count), rates=rates)


def test_a_large_product_runs_at_its_share_of_the_peak():
    seconds = matmul_seconds(a100(), 8192, 8192, 8192)
    assert seconds == pytest.approx(2 * 8192**3 / 312e12)
    assert matmul_seconds(a100(rates=replace(PERFECT, matmul=0.5)), 8192, 8192, 8192) == pytest.approx(
        2 * seconds
    )


def test_a_thin_product_is_bound_by_memory():
    assert matmul_seconds(a100(), 1, 4096, 4096) == pytest.approx(2 * (4096 + 4096 + 4096 * 4096) / 2039e9)


def test_a_short_inner_side_costs_what_its_rate_says():
    at = replace(PERFECT, half_rate_dim=128)
    assert matmul_seconds(a100(rates=at), 8192, 8192, 128) == pytest.approx(2 * 2 * 8192**2 * 128 / 312e12)


def test_the_last_wave_of_tiles_is_paid_for():
    """109 tiles on 108 units take as long as 216."""
    paid = replace(PERFECT, wave_tail=1)
    full, one_more = (
        matmul_seconds(a100(rates=paid), 108 * 128, 256, 4096),
        matmul_seconds(a100(rates=paid), 109 * 128, 256, 4096),
    )
    assert one_more == pytest.approx(2 * full)


def test_nothing_takes_less_than_a_start():
    given = a100(rates=replace(PERFECT, kernel_start_s=1e-5))
    assert matmul_seconds(given, 1, 1, 1) >= 1e-5
    assert memory_op_seconds(given, 0, num_kernels=3) == pytest.approx(3e-5)
    assert matmul_seconds(given, 0, 5, 5) == 0


def test_backward_of_attention_takes_two_and_a_half_times_as_much():
    assert attention_seconds(a100(), 312e12, backward=False) == pytest.approx(1)
    assert attention_seconds(a100(), 312e12, backward=True) == pytest.approx(2.5)
    assert attention_seconds(
        a100(rates=replace(PERFECT, attention_flash1=0.5)), 312e12, backward=False, kernel="flash1"
    ) == pytest.approx(2)


def test_ranks_of_one_host_gather_over_its_links():
    assert all_gather_seconds(a100(), 8e9, 8, 1, 64) == pytest.approx(7 / 8 * 8e9 / 300e9)
    assert all_gather_seconds(a100(), 8e9, 1, 1, 64) == 0


def test_a_ring_over_hosts_has_the_cards_of_all_its_ranks_on_one():
    """64 ranks side by side: eight on each host, so eight cards; with tensor ranks between them, fewer."""
    assert all_gather_seconds(a100(), 64e9, 64, 1, 64) == pytest.approx(63 / 64 * 64e9 / (8 * 25e9))
    assert all_gather_seconds(a100(), 64e9, 16, 4, 64) == pytest.approx(15 / 16 * 64e9 / (2 * 25e9))
    assert all_gather_seconds(a100(), 64e9, 8, 8, 64) == pytest.approx(7 / 8 * 64e9 / 25e9)


def test_in_an_exchange_each_rank_sends_through_its_own_card():
    assert exchange_seconds(a100(), 8e9, 8, 1, 64) == pytest.approx(7 / 8 * 8e9 / 300e9)
    assert exchange_seconds(a100(), 8e9, 1, 1, 64) == 0
    assert exchange_seconds(a100(), 64e9, 64, 1, 64) == pytest.approx(56 / 64 * 64e9 / 25e9)
    assert exchange_seconds(a100(), 64e9, 16, 4, 64) == pytest.approx(14 / 16 * 64e9 / 25e9)
    alone = all_gather_seconds(a100(), 64e9, 8, 8, 64)  # one rank per host: a ring sends as many
    assert exchange_seconds(a100(), 64e9, 8, 8, 64) == pytest.approx(alone)


def test_a_message_leaves_the_host_where_the_other_rank_does_not_lie_on_it():
    assert send_seconds(a100(), 3e9, stride=4) == pytest.approx(3e9 / 300e9)
    assert send_seconds(a100(), 3e9, stride=8) == pytest.approx(3e9 / 25e9)
