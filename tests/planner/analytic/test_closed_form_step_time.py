"""Step time from sizes: the closed forms of the papers, and what each strategy costs and saves."""

from dataclasses import replace

import pytest

from meshwright.parallel.pipeline.schedules.registry import find_schedule
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from meshwright.planner.analytic.closed_form_step_time import StepTime, step_time
from meshwright.planner.analytic.closed_form_step_time import pipeline_wait_s as waits
from meshwright.planner.analytic.layer_time import (
    PassTime,
    embedding_time,
    head_time,
    layer_collectives,
    layer_compute,
)
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import DUALPIPE, ZB_H1, ZB_V, ParallelConfig, ScheduleProfile
from meshwright.planner.machine.machine import make_machine
from tests.planner.analytic.free_machine import FREE, MACHINE, SHAPE


def made(**said: object) -> StepTime:
    return step_time(SHAPE, ParallelConfig(**{"num_microbatches": 16, **said}), FREE)


def test_the_terms_add_up():
    found = step_time(SHAPE, ParallelConfig(dp=4, tp=4, pp=4, num_microbatches=16), MACHINE)
    parts = (found.compute, found.tp_comm, found.pipeline_wait, found.dp_comm, found.optimizer, found.fixed)
    assert found.seconds == pytest.approx(sum(parts))
    assert all(part > 0 for part in parts)


@pytest.mark.parametrize(("pp", "micros"), [(2, 8), (3, 12), (8, 64)])
def test_the_pipeline_bubble_is_that_of_the_paper(pp: int, micros: int):
    """(p - 1) / m of what they compute (arXiv 2104.04473, section 2.2.1)."""
    found = made(pp=pp, num_microbatches=micros)
    assert found.pipeline_wait / found.compute == pytest.approx((pp - 1) / micros, rel=0.02)


def test_virtual_stages_divide_the_bubble():
    assert made(pp=4, virtual_stages=3).pipeline_wait == pytest.approx(made(pp=4).pipeline_wait / 3, rel=1e-6)


def test_a_zero_bubble_schedule_waits_less():
    """ZB-H1: (p - 1)(F + I - W), where W is nothing but products (arXiv 2401.10241)."""
    one = layer_compute(SHAPE, ParallelConfig(), FREE)
    plain, filled = made(pp=8), made(pp=8, schedule_profile=ZB_H1)
    assert one.weight_grad < one.backward / 2  # attention, norms and activations are in I
    assert filled.pipeline_wait / plain.pipeline_wait == pytest.approx(
        (one.total - 2 * one.weight_grad) / one.total, rel=0.01
    )


@pytest.mark.parametrize(
    ("schedule", "order", "chunks"), [("1f1b", ScheduleProfile(), 1), ("zb_h1", ZB_H1, 1), ("zb_v", ZB_V, 2)]
)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_the_bubble_equals_that_of_the_simulated_schedule_for_any_number_of_micro_batches(
    schedule: str, order: ScheduleProfile, chunks: int, pp: int
):
    found = find_schedule(schedule)
    assert found is not None
    for micros in (1, 2, 3, pp, pp + 1, 2 * pp, 4 * pp):
        one = PassTime(1.0, 2.0)
        lists = found.build(pp, micros, chunks, StageCosts.uniform(pp * chunks))
        equal = StageCosts.uniform(pp * chunks, *[1.0 / chunks] * 3)
        waited = simulate(lists, equal).end - micros * one.total
        layout = ParallelConfig(pp=pp, num_microbatches=micros, schedule_profile=order, virtual_stages=chunks)
        assert waits(layout, one, (pp - 1) * one.total) == pytest.approx(waited)


def test_activation_checkpointing_adds_one_forward():
    one = layer_compute(SHAPE, ParallelConfig(), FREE)
    plain, again, half = made(), made(recompute="layers"), made(recompute="layers", recompute_fraction=0.5)
    assert again.compute - plain.compute == pytest.approx(16 * 48 * one.forward, rel=1e-6)
    assert half.compute - plain.compute == pytest.approx(8 * 48 * one.forward, rel=1e-6)


def test_ddp_reduces_once_per_step_and_zero_gathers_weights_per_micro_batch():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-3))
    kept, shards = (
        step_time(SHAPE, ParallelConfig(dp=64, num_microbatches=4, zero_stage=stage), slow)
        for stage in (1, 3)
    )
    twice = step_time(SHAPE, ParallelConfig(dp=64, num_microbatches=8, zero_stage=1), slow)
    assert twice.dp_comm == pytest.approx(kept.dp_comm)
    assert shards.compute > 10 * kept.compute  # each layer waits for its weights


def test_the_head_of_a_large_vocabulary_is_on_the_last_pipeline_rank():
    wide = replace(SHAPE, vocab=128_000)
    alone = head_time(wide, ParallelConfig(), FREE).total
    found = step_time(wide, ParallelConfig(pp=4, num_microbatches=16), FREE)
    assert found.compute == pytest.approx(made(pp=4).compute + 16 * alone, rel=0.01)


def test_sharded_optimizer_states_are_stepped_by_their_owners_only():
    assert made(dp=8, zero_stage=1).optimizer < made(dp=8).optimizer / 3


def test_v_shaped_stages_have_embedding_and_head_on_one_rank():
    """Embedding and head of the same rank: each microbatch pays for both there."""
    wide = replace(SHAPE, vocab=128_000)
    ends = (head_time(wide, ParallelConfig(), FREE) + embedding_time(wide, ParallelConfig(), FREE)).total
    straight, folded = (
        step_time(
            wide,
            ParallelConfig(
                pp=4, num_microbatches=16, schedule_profile=ScheduleProfile(0, 0, 0, is_folded=each)
            ),
            FREE,
        )
        for each in (False, True)
    )
    assert folded.compute - straight.compute == pytest.approx(
        16 * (ends - head_time(wide, ParallelConfig(), FREE).total), rel=1e-3
    )


def test_small_kernels_wait_for_the_host_and_large_ones_do_not():
    slow = replace(FREE, rates=replace(FREE.rates, kernel_launch_s=2e-5))
    small = ModelShape("small", 48, 256, 4, vocab=128, sequence=128)
    assert (
        step_time(small, ParallelConfig(), slow).compute
        > 3 * step_time(small, ParallelConfig(), FREE).compute
    )
    large = ParallelConfig(micro_batch=8)
    assert step_time(SHAPE, large, slow).compute == pytest.approx(
        step_time(SHAPE, large, FREE).compute, rel=1e-3
    )


def test_sums_that_run_beside_the_backward_wait_for_the_embeddings_alone():
    there = replace(MACHINE, rates=replace(MACHINE.rates, grad_reduce_overlap=0.9))
    beside = step_time(
        SHAPE, ParallelConfig(dp=64, micro_batch=16, zero_stage=1, overlap_fraction=True), there
    ).dp_comm
    behind = step_time(
        SHAPE,
        ParallelConfig(dp=64, micro_batch=16, zero_stage=1),
        replace(there, rates=replace(there.rates, grad_reduce_overlap=0.0)),
    ).dp_comm
    assert 0 < beside < behind / 50


def test_weights_that_are_gathered_in_few_bits_are_waited_for_less():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-3))
    two, one = (
        step_time(SHAPE, ParallelConfig(dp=64, zero_stage=3, param_gather_itemsize=each), slow).compute
        for each in (2, 1)
    )
    assert one < 0.8 * two


def test_zero_2_reduces_gradients_after_every_micro_batch():
    """(m + 1) a of stage 2 where stage 1 sends 2 a (parallel/data/zero.py)."""
    for micros in (1, 8):
        first, second = (
            step_time(
                SHAPE, ParallelConfig(dp=16, num_microbatches=micros, zero_stage=stage), MACHINE
            ).dp_comm
            for stage in (1, 2)
        )
        assert second / first == pytest.approx((micros + 1) / 2)


def test_hsdp_gathers_inside_a_host_and_reduces_shards_across():
    slow = replace(MACHINE, rates=replace(MACHINE.rates, nic=1e-2))
    whole, hosts = (
        step_time(
            SHAPE, ParallelConfig(dp=64, num_microbatches=4, zero_stage=3, zero_group_size=within), slow
        )
        for within in (0, 8)
    )
    assert hosts.compute < whole.compute / 3
    fewer, more = (
        step_time(
            SHAPE, ParallelConfig(dp=64, num_microbatches=micros, zero_stage=3, zero_group_size=8), slow
        ).dp_comm
        for micros in (2, 8)
    )
    assert fewer == pytest.approx(more)  # once per step


def test_replicas_inside_hosts_leave_the_slow_links_to_tensor_parallel_ranks():
    tensor, copies = (
        step_time(SHAPE, ParallelConfig(dp=8, tp=8, num_microbatches=4, tp_across_hosts=each), MACHINE)
        for each in (False, True)
    )
    assert copies.tp_comm > 2 * tensor.tp_comm
    assert copies.dp_comm < tensor.dp_comm


def test_stages_on_two_ranks_are_reduced_between_them():
    plain, both = (
        step_time(SHAPE, ParallelConfig(pp=4, num_microbatches=16, schedule_profile=order), MACHINE)
        for order in (ScheduleProfile(), DUALPIPE)
    )
    assert plain.dp_comm == 0 < both.dp_comm
    assert both.optimizer > 1.9 * plain.optimizer
    assert both.pipeline_wait < plain.pipeline_wait


def test_recomputing_by_operator_costs_half_of_the_products_and_all_that_lies_between():
    plain, scores, operators, layers = (
        step_time(SHAPE, ParallelConfig(num_microbatches=4, recompute=each), FREE).compute
        for each in ("none", "attention", "operators", "layers")
    )
    assert plain < scores < operators < layers
    assert 1 / 3 < (operators - plain) / (layers - plain) < 0.9


def test_weights_that_are_gathered_one_by_one_cost_more_the_more_ranks_there_are():
    few, many = (
        step_time(
            SHAPE, ParallelConfig(dp=ranks, zero_stage=3, gathers_per_param=True, micro_batch=4), MACHINE
        ).compute
        for ranks in (64, 512)
    )
    whole = [
        step_time(SHAPE, ParallelConfig(dp=ranks, zero_stage=3, micro_batch=4), MACHINE).compute
        for ranks in (64, 512)
    ]
    asked = 12 * (512 - 64) * MACHINE.rates.kernel_launch_s * 2 * SHAPE.layers
    assert many - few == pytest.approx(asked, rel=0.2)
    assert whole[1] - whole[0] < asked / 5


@pytest.mark.parametrize("pp", [3, 4, 7])
def test_a_head_heavier_than_layers_is_waited_for_where_stages_are_uneven(pp: int):
    """The last rank has a layer less, and a head of many layers: no step is shorter than what it is busy."""
    shape = ModelShape("wide", 26, 1152, 4, ffn=6912, vocab=262144, sequence=4096)
    layout = ParallelConfig(pp=pp, num_microbatches=16, micro_batch=2)
    found, last = step_time(shape, layout, FREE), head_time(shape, layout, FREE)
    one = layer_compute(shape, layout, FREE)
    assert last.total > 2 * one.total
    assert found.compute >= 16 * ((26 // pp) * one.total + last.total)


def test_the_pipeline_bubble_is_never_negative():
    """Where small products make W long, it fills all that there is to wait, and gives nobody time back."""
    shape, given = ModelShape("thin", 4, 256, 4, vocab=512, sequence=64), make_machine("V100", 8)
    layout = ParallelConfig(pp=2, tp=4, num_microbatches=16, schedule_profile=ZB_H1, sequence_parallel=True)
    one = layer_compute(shape, layout, given) + layer_collectives(shape, layout, given)
    long = replace(one, weight_grad=one.total)
    assert waits(layout, one, one.total) >= 0.0
    assert waits(layout, long, long.total) == 0.0
