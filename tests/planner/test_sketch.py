"""A step from sizes: the closed forms of the papers, and that each technique costs and saves what it should."""

from dataclasses import replace

import pytest

from meshwright.planner.hardware import machine
from meshwright.planner.layout import Layout, Order
from meshwright.planner.shapes import Shape
from meshwright.planner.sketch import Both, Step, entry, head, layer, meetings, step

SHAPE = Shape("gpt", 48, 4096, 32, vocab=128)  # hardly any head, so that ranks along pp are alike
MACHINE = machine("A100", 512)
FREE = replace(
    MACHINE, rates=replace(MACHINE.rates, link=1e9, nic=1e9, latency_s=0.0, start_s=0.0, launch_s=0.0, turn_s=0.0, fixed_s=0.0)
)  # no transfer costs


def made(**said: object) -> Step:
    return step(SHAPE, Layout(**{"micros": 16, **said}), FREE)


def test_the_parts_add_up():
    found = step(SHAPE, Layout(dp=4, tp=4, pp=4, micros=16), MACHINE)
    parts = (found.compute, found.tensor, found.waiting, found.copies, found.optimizer, found.fixed)
    assert found.seconds == pytest.approx(sum(parts))
    assert all(part > 0 for part in parts)


@pytest.mark.parametrize(("pp", "micros"), [(2, 8), (3, 12), (8, 64)])
def test_ranks_along_pp_wait_as_the_paper_says(pp: int, micros: int):
    """(p - 1) / m of what they compute (arXiv 2104.04473, section 2.2.1)."""
    found = made(pp=pp, micros=micros)
    assert found.waiting / found.compute == pytest.approx((pp - 1) / micros, rel=0.02)


def test_chunks_divide_what_they_wait():
    assert made(pp=4, chunks=3).waiting == pytest.approx(made(pp=4).waiting / 3, rel=1e-6)


def test_an_order_that_fills_its_gaps_with_halves_waits_less():
    """ZB-H1: (p - 1)(F + B - W), a third of 1F1B's where all three take as long (arXiv 2401.10241)."""
    one = layer(SHAPE, Layout(), FREE)
    plain, filled = made(pp=8), made(pp=8, order=Order(1.0, 1.0, -1.0))
    assert filled.waiting / plain.waiting == pytest.approx((one.forward + one.backward / 2) / one.all, rel=0.01)


def test_what_is_rerun_is_computed_once_more():
    one = layer(SHAPE, Layout(), FREE)
    plain, again, half = made(), made(reruns="layers"), made(reruns="layers", rerun_share=0.5)
    assert again.compute - plain.compute == pytest.approx(16 * 48 * one.forward, rel=1e-6)
    assert half.compute - plain.compute == pytest.approx(8 * 48 * one.forward, rel=1e-6)


def test_attention_that_writes_its_scores_out_takes_longer():
    seconds = [layer(SHAPE, Layout(kernel=kernel), MACHINE).all for kernel in ("flash2", "flash1", "softmax", "eager")]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_tensor_ranks_divide_the_work_and_meet_for_it():
    """Their all-reduces send 8 b s h (t - 1) / t elements per layer and micro-batch (arXiv 2104.04473, section 3.2)."""
    given = replace(MACHINE, rates=replace(MACHINE.rates, latency_s=0.0))
    nbytes = 2 * 8 * SHAPE.sequence * SHAPE.hidden * 3 / 4
    assert meetings(SHAPE, Layout(tp=4), given).all == pytest.approx(nbytes / given.link_rate)
    assert meetings(SHAPE, Layout(), given) == Both()
    assert layer(SHAPE, Layout(tp=4), FREE).all < layer(SHAPE, Layout(), FREE).all / 2
    assert meetings(SHAPE, Layout(tp=4, hidden=True), given).all < meetings(SHAPE, Layout(tp=4), given).all


def test_copies_sum_once_per_step_and_weights_in_shards_are_gathered_per_micro_batch():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-3))
    kept, shards = (step(SHAPE, Layout(dp=64, micros=4, shards=stage), slow) for stage in (1, 3))
    twice = step(SHAPE, Layout(dp=64, micros=8, shards=1), slow)
    assert twice.copies == pytest.approx(kept.copies)
    assert shards.compute > 10 * kept.compute  # each layer waits for its weights


def test_a_head_of_many_words_falls_on_the_last_rank_along_pp():
    wide = replace(SHAPE, vocab=128_000)
    alone = head(wide, Layout(), FREE).all
    found = step(wide, Layout(pp=4, micros=16), FREE)
    assert found.compute == pytest.approx(made(pp=4).compute + 16 * alone, rel=0.01)


def test_moments_in_shards_are_stepped_by_their_owners_alone():
    assert made(dp=8, shards=1).optimizer < made(dp=8).optimizer / 3


def test_parts_that_are_folded_have_both_ends_on_one_rank():
    """Embedding and head of the same rank: each micro-batch pays for both there."""
    wide = replace(SHAPE, vocab=128_000)
    ends = (head(wide, Layout(), FREE) + entry(wide, Layout(), FREE)).all
    straight, folded = (step(wide, Layout(pp=4, micros=16, order=Order(0, 0, 0, folded=each)), FREE) for each in (False, True))
    assert folded.compute - straight.compute == pytest.approx(16 * (ends - head(wide, Layout(), FREE).all), rel=1e-3)


def test_small_kernels_wait_for_the_host_and_large_ones_do_not():
    slow = replace(FREE, rates=replace(FREE.rates, launch_s=2e-5))
    small = Shape("small", 48, 256, 4, vocab=128, sequence=128)
    assert step(small, Layout(), slow).compute > 3 * step(small, Layout(), FREE).compute
    large = Layout(micro_batch=8)
    assert step(SHAPE, large, slow).compute == pytest.approx(step(SHAPE, large, FREE).compute, rel=1e-3)


def test_sums_that_run_beside_the_backward_wait_for_the_embeddings_alone():
    there = replace(MACHINE, rates=replace(MACHINE.rates, sums_hidden=0.9))
    beside = step(SHAPE, Layout(dp=64, micro_batch=16, shards=1, hidden=True), there).copies
    behind = step(
        SHAPE, Layout(dp=64, micro_batch=16, shards=1), replace(there, rates=replace(there.rates, sums_hidden=0.0))
    ).copies
    assert 0 < beside < behind / 50


def test_layers_in_few_bits_pay_for_casts_and_the_head_stays_in_sixteen():
    h100 = machine("H100", 8)
    free = replace(h100, rates=replace(h100.rates, casts=0.0))
    few = Layout(dtype="float8")
    assert layer(SHAPE, Layout(), h100).all > layer(SHAPE, few, h100).all > layer(SHAPE, few, free).all
    assert head(SHAPE, few, h100) == head(SHAPE, Layout(), h100)


def test_weights_that_are_gathered_in_few_bits_are_waited_for_less():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-3))
    two, one = (step(SHAPE, Layout(dp=64, shards=3, gathers=each), slow).compute for each in (2, 1))
    assert one < 0.8 * two
