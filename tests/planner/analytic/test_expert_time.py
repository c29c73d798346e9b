"""Experts in closed form: parameters of published models, rows that are computed and sent, memory."""

from dataclasses import replace
from math import comb

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.planner.analytic.closed_form_memory import estimate_memory, estimate_memory_at_most
from meshwright.planner.analytic.closed_form_step_time import step_time
from meshwright.planner.analytic.expert_time import (
    expert_compute,
    expert_dispatch,
    local_expert_numel,
    max_expert_load,
)
from meshwright.planner.analytic.layer_time import layer_collectives
from meshwright.planner.analytic.model_shape import parse_shape
from meshwright.planner.analytic.parallel_config import ExpertCosts, ParallelConfig
from meshwright.planner.machine.machine import make_machine

LATENT = "q_rank 1536 kv_rank 512 head 128 rope_head 64 value_head 128"
DEEPSEEK = (
    "v3: layers 61 hidden 7168 heads 128 ffn 18432 vocab 129280 sequence 4096 gated experts 256 top_k 8 "
    f"expert_ffn 2048 shared_ffn 2048 dense_layers 3 {LATENT}"
)
MIXTRAL = "8x7b: layers 32 hidden 4096 heads 32 kv_heads 8 ffn 14336 vocab 32000 gated experts 8 top_k 2"
FREE = make_machine("H100", 64)
FREE = replace(FREE, rates=replace(FREE.rates, latency_s=0.0))


@pytest.mark.parametrize(
    ("text", "billions", "active"),
    [
        (DEEPSEEK, 671, 37.6),
        (MIXTRAL, 46.7, 12.9),
        (
            "qwen3: layers 94 hidden 4096 heads 64 kv_heads 4 head 128 ffn 1536 vocab 151936 gated "
            "experts 128 top_k 8",
            235,
            22.2,
        ),
        (
            "gpt-oss: layers 36 hidden 2880 heads 64 kv_heads 8 head 64 ffn 2880 vocab 201088 gated "
            "experts 128 top_k 4",
            116.8,
            5.1 + 0.58,  # the published figure leaves the embedding out
        ),
        ("olmoe: layers 16 hidden 2048 heads 16 ffn 1024 vocab 50304 gated experts 64 top_k 8", 6.9, 1.3),
    ],
)
def test_published_models_have_their_published_parameters(text: str, billions: float, active: float):
    shape = parse_shape(text)
    assert shape.numel / 1e9 == pytest.approx(billions, rel=0.003)
    assert shape.active_numel / 1e9 == pytest.approx(active, rel=0.015)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("experts 8", "top_k 0 of experts 8"),
        ("experts 8 top_k 9", "top_k 9 of experts 8"),
        ("experts 8 top_k 2 dense_layers 4", "dense_layers 4 of layers 4"),
        ("top_k 2", "top_k without experts"),
    ],
)
def test_experts_that_no_model_has_are_refused(sizes: str, message: str):
    with pytest.raises(PlanError, match=message):
        parse_shape(f"x: layers 4 hidden 64 heads 4 {sizes}")


def test_a_token_is_sent_once_to_each_rank_that_has_one_of_its_experts():
    shape, layout = parse_shape(MIXTRAL), ParallelConfig(dp=4, ep=4, expert_load=1.0)
    reached = 3 * (1 - comb(6, 2) / comb(8, 2))  # of 3 other ranks with 2 of 8 experts each
    row = 2 * 4096
    nbytes = shape.sequence * reached * (row + 8 * 2 + row)
    found = expert_dispatch(shape, layout, FREE)
    assert found.forward == pytest.approx(nbytes / FREE.link_rate)
    per_expert = replace(layout, expert_costs=ExpertCosts(sends_per_expert=True))
    assert expert_dispatch(shape, per_expert, FREE).forward == pytest.approx(found.forward * 1.5 / reached)
    assert expert_dispatch(shape, ParallelConfig(dp=4), FREE).total == 0


def test_a_token_that_is_sent_once_per_host_leaves_it_less_often():
    shape, layout = parse_shape(DEEPSEEK), ParallelConfig(dp=64, ep=64)
    once = replace(layout, expert_costs=ExpertCosts(sends_per_host=True))
    outside = 56 * (1 - comb(252, 8) / comb(256, 8)), 7 * (1 - comb(224, 8) / comb(256, 8))
    ratio = expert_dispatch(shape, once, FREE).forward / expert_dispatch(shape, layout, FREE).forward
    assert ratio == pytest.approx(outside[1] / outside[0])


def test_the_busiest_rank_computes_and_stores_its_load_and_at_most_all_rows():
    shape, layout = parse_shape(MIXTRAL), ParallelConfig(dp=4, ep=4, expert_load=1.0, micro_batch=8)
    even, loaded = layout, replace(layout, expert_load=1.6)
    ratio = expert_compute(shape, loaded, FREE).total / expert_compute(shape, even, FREE).total
    assert 1.5 < ratio < 1.6
    assert max_expert_load(shape, layout) == 4  # both experts of every token are on one rank
    assert max_expert_load(shape, replace(layout, ep=8)) == 4  # one of them
    memory = [estimate_memory(shape, each).activations for each in (even, loaded)]
    all_chosen = replace(shape, top_k=8)  # no rank can be busier than others
    assert estimate_memory_at_most(all_chosen, layout) == estimate_memory(all_chosen, loaded)
    most = estimate_memory_at_most(shape, layout).activations
    assert (most - memory[0]) == pytest.approx((memory[1] - memory[0]) * 3 / 0.6)


def test_experts_are_divided_by_ep_and_their_states_by_the_ranks_that_share_them():
    shape = parse_shape(MIXTRAL)
    copies, divided = ParallelConfig(dp=8), ParallelConfig(dp=8, ep=4)
    experts = shape.layers * shape.layer_expert_numel
    saved = estimate_memory(shape, copies).weights - estimate_memory(shape, divided).weights
    assert saved == pytest.approx(2 * experts * 3 / 4)
    sharded = [estimate_memory(shape, replace(each, zero_stage=1)) for each in (copies, divided)]
    assert sharded[0].optimizer_states == sharded[1].optimizer_states  # 1 / 8 of everything
    sliced = ParallelConfig(dp=4, tp=2, ep=2, expert_tp=2)
    assert local_expert_numel(shape, sliced) == shape.layer_expert_numel / 4


def test_folded_experts_take_the_ranks_of_tp_and_each_sends_its_tokens():
    """Parallel folding: ep 8 over dp 4 and tp 2 (arXiv 2504.14960)."""
    shape = parse_shape(MIXTRAL)
    folded = ParallelConfig(dp=4, tp=2, ep=8, sequence_parallel=True)
    plain = ParallelConfig(dp=4, tp=2, ep=4)
    assert not list(folded.diagnostics(shape))
    assert [each.problem for each in replace(plain, ep=8).diagnostics(shape)] == [
        "ep 8 for 8 experts on 4 replicas"
    ]
    ratio = expert_compute(shape, folded, FREE).total / expert_compute(shape, plain, FREE).total
    assert 0.45 < ratio < 0.6


def test_tensor_ranks_with_different_experts_send_nothing_and_sum_what_they_compute():
    shape = parse_shape(MIXTRAL)
    whole = ParallelConfig(tp=4, expert_load=1.0, micro_batch=16)
    summed, sliced = replace(whole, ep=4, ep_tp=4), replace(whole, expert_tp=4)
    assert not list(summed.diagnostics(shape))
    assert local_expert_numel(shape, summed) == shape.layer_expert_numel / 4
    assert expert_dispatch(shape, summed, FREE).total == 0
    sums = [layer_collectives(shape, each, FREE).total for each in (whole, summed, sliced)]
    assert sums[0] < sums[1] == sums[2]
    balanced, loaded, narrow = (
        expert_compute(shape, each, FREE).total for each in (summed, replace(summed, expert_load=4.0), sliced)
    )
    assert balanced < narrow < loaded


def test_shared_and_chosen_experts_are_summed_each_by_themselves():
    shape = replace(parse_shape(DEEPSEEK), dense_layers=0)
    shared, both = ParallelConfig(tp=4), ParallelConfig(tp=4, expert_tp=4)
    sums = [layer_collectives(shape, each, FREE).total for each in (shared, both)]
    assert sums[1] / sums[0] == pytest.approx(6 / 4)  # of attention, and of one or two MLPs


def test_beside_tensor_ranks_with_different_experts_fewer_rows_travel():
    shape = parse_shape(MIXTRAL)
    plain = ParallelConfig(dp=2, tp=4, ep=2, expert_load=1.0)
    folded = replace(plain, ep=8, ep_tp=4)
    seconds = [expert_dispatch(shape, each, FREE).total for each in (plain, folded)]
    reached = [1 - comb(8 - each, 2) / comb(8, 2) for each in (4, 1)]  # four experts there, or one
    assert seconds[1] / seconds[0] == pytest.approx(reached[1] / reached[0])
    assert (folded.ep_dispatch, folded.ep_dp) == (2, 2)


def test_cp_joins_where_dp_has_no_such_divisor():
    along_dp, along_cp = ParallelConfig(dp=8, cp=4, ep=8), ParallelConfig(dp=2, cp=4, ep=8)
    assert (along_dp.ep_dp, along_cp.ep_dp) == (8, 2)
    assert not list(along_cp.diagnostics(parse_shape(MIXTRAL)))


def test_a_step_without_ep_reads_all_experts_and_with_it_reduces_fewer_gradients():
    shape = parse_shape(MIXTRAL)
    alone, divided = (step_time(shape, ParallelConfig(dp=8, ep=ep, expert_load=1.0), FREE) for ep in (1, 8))
    assert divided.dp_comm < 0.2 * alone.dp_comm
    assert divided.optimizer < 0.2 * alone.optimizer
    assert divided.tp_comm > alone.tp_comm == 0
