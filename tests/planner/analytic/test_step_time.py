"""A step from sizes: the closed forms of the papers, and that each technique costs and saves what it should."""

from dataclasses import replace

import pytest

from meshwright.parallel.pipeline.schedules.registry import find_schedule
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from meshwright.planner.analytic.model_shape import Shape
from meshwright.planner.analytic.parallel_config import BOTH, FOLDED, HALVES, Layout, Order
from meshwright.planner.analytic.step_time import Both, Step, entry, head, layer, meetings, step
from meshwright.planner.analytic.step_time import waited as waits
from meshwright.planner.machine.machine import machine

SHAPE = Shape("gpt", 48, 4096, 32, vocab=128)  # hardly any head, so that ranks along pp are alike
MACHINE = machine("A100", 512)
FREE = replace(
    MACHINE,
    rates=replace(
        MACHINE.rates, link=1e9, nic=1e9, latency_s=0.0, start_s=0.0, launch_s=0.0, turn_s=0.0, fixed_s=0.0
    ),
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
    """ZB-H1: (p - 1)(F + I - W), where W is nothing but products (arXiv 2401.10241)."""
    one = layer(SHAPE, Layout(), FREE)
    plain, filled = made(pp=8), made(pp=8, order=HALVES)
    assert one.weights < one.backward / 2  # attention, norms and activations are in I
    assert filled.waiting / plain.waiting == pytest.approx((one.all - 2 * one.weights) / one.all, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "order", "chunks"), [("1f1b", Order(), 1), ("zb_h1", HALVES, 1), ("zb_v", FOLDED, 2)]
)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_what_ranks_wait_is_what_their_lists_on_paper_wait_however_few_micro_batches(
    schedule: str, order: Order, chunks: int, pp: int
):
    found = find_schedule(schedule)
    assert found is not None
    for micros in (1, 2, 3, pp, pp + 1, 2 * pp, 4 * pp):
        one = Both(1.0, 2.0)
        lists = found.build(pp, micros, chunks, StageCosts.uniform(pp * chunks))
        equal = StageCosts.uniform(pp * chunks, *[1.0 / chunks] * 3)
        waited = simulate(lists, equal).end - micros * one.all
        layout = Layout(pp=pp, micros=micros, order=order, chunks=chunks)
        assert waits(layout, one, (pp - 1) * one.all) == pytest.approx(waited)


def test_what_is_rerun_is_computed_once_more():
    one = layer(SHAPE, Layout(), FREE)
    plain, again, half = made(), made(reruns="layers"), made(reruns="layers", rerun_share=0.5)
    assert again.compute - plain.compute == pytest.approx(16 * 48 * one.forward, rel=1e-6)
    assert half.compute - plain.compute == pytest.approx(8 * 48 * one.forward, rel=1e-6)


def test_attention_that_writes_its_scores_out_takes_longer():
    seconds = [
        layer(SHAPE, Layout(kernel=kernel), MACHINE).all
        for kernel in ("flash2", "flash1", "softmax", "eager")
    ]
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
    straight, folded = (
        step(wide, Layout(pp=4, micros=16, order=Order(0, 0, 0, folded=each)), FREE) for each in (False, True)
    )
    assert folded.compute - straight.compute == pytest.approx(
        16 * (ends - head(wide, Layout(), FREE).all), rel=1e-3
    )


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
        SHAPE,
        Layout(dp=64, micro_batch=16, shards=1),
        replace(there, rates=replace(there.rates, sums_hidden=0.0)),
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


def test_ranks_that_swap_tokens_for_heads_send_what_their_paper_says():
    """(2 + 2 k / a) B N h / P (P - 1) / P elements forward and as many backward (arXiv 2309.14509, section 3.2)."""
    shape = replace(SHAPE, sequence=16_384)
    given = replace(MACHINE, rates=replace(MACHINE.rates, latency_s=0.0))
    swapped = meetings(shape, Layout(cp=4, swaps=4), given)
    nbytes = 2 * 4 * shape.sequence * shape.hidden / 4 * 3 / 4
    assert swapped.forward == swapped.backward == pytest.approx(nbytes / given.link_rate)
    grouped = meetings(replace(shape, kv_heads=4), Layout(cp=4, swaps=4), given)  # k / a = 1 / 8
    assert grouped.forward / swapped.forward == pytest.approx((2 + 2 / 8) / 4)
    both = meetings(shape, Layout(cp=4, swaps=2), given)
    assert (
        both.forward >= nbytes * (4 / 2) * (1 / 2) / (3 / 4) / 2 / given.link_rate
    )  # half of the ranks, (u - 1) / u of 1 / 2


def test_shares_of_gradients_are_summed_behind_every_micro_batch():
    """(m + 1) a of stage 2 where stage 1 sends 2 a (strategies/data/zero.py)."""
    for micros in (1, 8):
        first, second = (
            step(SHAPE, Layout(dp=16, micros=micros, shards=stage), MACHINE).copies for stage in (1, 2)
        )
        assert second / first == pytest.approx((micros + 1) / 2)


def test_groups_that_share_among_a_host_gather_inside_it_and_sum_shares_across():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-2))
    whole, hosts = (step(SHAPE, Layout(dp=64, micros=4, shards=3, within=within), slow) for within in (0, 8))
    assert hosts.compute < whole.compute / 3
    fewer, more = (
        step(SHAPE, Layout(dp=64, micros=micros, shards=3, within=8), slow).copies for micros in (2, 8)
    )
    assert fewer == pytest.approx(more)  # once per step


def test_copies_inside_hosts_leave_the_slow_links_to_tensor_ranks():
    tensor, copies = (
        step(SHAPE, Layout(dp=8, tp=8, micros=4, outside=each), MACHINE) for each in (False, True)
    )
    assert copies.tensor > 2 * tensor.tensor
    assert copies.copies < tensor.copies


def test_parts_that_lie_on_two_ranks_are_summed_between_them():
    plain, both = (step(SHAPE, Layout(pp=4, micros=16, order=order), MACHINE) for order in (Order(), BOTH))
    assert plain.copies == 0 < both.copies
    assert both.optimizer > 1.9 * plain.optimizer
    assert both.waiting < plain.waiting


def test_heads_of_a_width_that_matrix_units_cannot_load_cost_what_float32_costs():
    """Planted once: without this, published runs with heads 108 and 150 wide were said to be a quarter faster than they were."""
    plain = Layout(kernel="softmax")
    odd, even = (layer(replace(SHAPE, hidden=32 * width, ffn=16384), plain, MACHINE) for width in (108, 112))
    assert odd.all > 1.1 * even.all
    fused = [layer(replace(SHAPE, hidden=32 * width, ffn=16384), Layout(), MACHINE) for width in (108, 112)]
    assert fused[0].all < fused[1].all  # fused kernels fill such heads up


def test_recomputing_by_operator_costs_half_of_the_products_and_all_that_lies_between():
    plain, scores, operators, layers = (
        step(SHAPE, Layout(micros=4, reruns=each), FREE).compute
        for each in ("none", "attention", "operators", "layers")
    )
    assert plain < scores < operators < layers
    assert 1 / 3 < (operators - plain) / (layers - plain) < 0.9


def test_weights_that_are_gathered_one_by_one_cost_more_the_more_ranks_there_are():
    few, many = (
        step(SHAPE, Layout(dp=ranks, shards=3, piecewise=True, micro_batch=4), MACHINE).compute
        for ranks in (64, 512)
    )
    whole = [step(SHAPE, Layout(dp=ranks, shards=3, micro_batch=4), MACHINE).compute for ranks in (64, 512)]
    asked = 12 * (512 - 64) * MACHINE.rates.launch_s * 2 * SHAPE.layers
    assert many - few == pytest.approx(asked, rel=0.2)
    assert whole[1] - whole[0] < asked / 5


def test_code_that_hides_half_of_its_transfers_lies_between_all_and_nothing():
    seen = [meetings(SHAPE, Layout(tp=4, hidden=share), MACHINE).all for share in (0.0, 0.5, 1.0)]
    assert seen[1] == pytest.approx((seen[0] + seen[2]) / 2)


def test_a_scale_per_row_costs_casts_and_not_products():
    """What it adds grows with tokens and sizes, not with their products: a wider model pays less of its step for it."""
    h100 = machine("H100", 8)

    def more(shape: Shape) -> float:
        row, tensor = (layer(shape, Layout(dtype=dtype), h100).all for dtype in ("float8_rowwise", "float8"))
        return row / tensor

    assert more(SHAPE) > more(replace(SHAPE, hidden=16_384, heads=128)) > 1


def test_kernels_written_for_the_device_attend_faster_than_older_ones():
    long = replace(SHAPE, sequence=32_768)
    seconds = [
        layer(long, Layout(kernel=kernel), machine("H100", 8)).all
        for kernel in ("flash1", "flash2", "flash3")
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("pp", [3, 4, 7])
def test_a_head_heavier_than_layers_is_waited_for_where_parts_are_uneven(pp: int):
    """The last rank has a layer less, and a head of many layers: no step is shorter than what it is busy."""
    shape = Shape("wide", 26, 1152, 4, ffn=6912, vocab=262144, sequence=4096)
    layout = Layout(pp=pp, micros=16, micro_batch=2)
    found, last = step(shape, layout, FREE), head(shape, layout, FREE)
    one = layer(shape, layout, FREE)
    assert last.all > 2 * one.all
    assert found.compute >= 16 * ((26 // pp) * one.all + last.all)


def test_ranks_along_pp_never_wait_less_than_not_at_all():
    """Where small products make W long, it fills all that there is to wait, and gives nobody time back."""
    shape, given = Shape("thin", 4, 256, 4, vocab=512, sequence=64), machine("V100", 8)
    layout = Layout(pp=2, tp=4, micros=16, order=HALVES, sequence=True)
    one = layer(shape, layout, given) + meetings(shape, layout, given)
    long = replace(one, weights=one.all)
    assert waits(layout, one, one.all) >= 0.0
    assert waits(layout, long, long.all) == 0.0
