"""Counts of choices: their order among the sums of a step, and the experts of each rank."""

from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.plan.sharding.expert_load import (
    ExpertLoad,
    busiest,
    expert_loads,
    expert_ranges,
    expert_ranges_by_layer,
    num_load_counts,
)
from meshwright.plan.sharding.tensor_placements import Layout, S
from tests.parallel.expert.mixture_model import analyzed_mixtral, sgd_job

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def plan_on(mesh: mw.Mesh, *strategies: mw.Strategy) -> mw.Plan:
    return mw.make_plan(analyzed_mixtral(), sgd_job(), mesh, strategies or None)


def test_each_layer_counts_its_experts_and_dropped_choices():
    sharding = plan_on(mw.Mesh()).sharding
    assert num_load_counts(sharding) == 2 * (5 + 1)
    assert expert_loads(sharding, [float(each) for each in range(12)]) == (
        ExpertLoad(LAYERS[0], (0, 1, 2, 3, 4), 5),
        ExpertLoad(LAYERS[1], (6, 7, 8, 9, 10), 11),
    )


def test_the_sum_of_the_loss_carries_the_counts():
    for mesh in (mw.Mesh(dp_replicate=2), mw.Mesh(ep=2), mw.Mesh(cp=2), mw.Mesh(pp=2)):
        actions = plan_on(mesh).for_rank(0).actions
        nbytes = {action.kind: action.transfer.nbytes for action in actions if action.transfer}
        assert nbytes["LOSS_SUM"] == 8 * (1 + 12), mesh


def test_nothing_is_counted_where_ranks_share_tokens_along_tp():
    sharding = plan_on(mw.Mesh(tp=2)).sharding
    assert num_load_counts(replace(sharding, residual_layout=Layout((("tp", S(1)),)))) == 0


def test_ranks_have_the_experts_that_their_weights_are_sliced_to():
    found = expert_ranges_by_layer(plan_on(mw.Mesh(ep=3)).sharding)
    assert found == {layer: [(0, 2), (2, 4), (4, 5)] for layer in LAYERS}
    assert expert_ranges_by_layer(plan_on(mw.Mesh(tp=2)).sharding) == {}


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(5, 3), (8, 2), (3, 3), (7, 4)])
def test_ranks_have_all_experts_in_order_the_first_one_more(num_experts: int, num_ranks: int):
    found = expert_ranges(num_experts, num_ranks)
    assert [each for first, end in found for each in range(first, end)] == list(range(num_experts))
    sizes = [end - first for first, end in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_loads_are_added_and_compared():
    load = ExpertLoad("a", (4, 0, 2), 1) + ExpertLoad("a", (1, 1, 1), 2)
    assert load == ExpertLoad("a", (5, 1, 3), 3)
    assert load.rank_counts([(0, 2), (2, 3)]) == (6, 3)
    assert busiest(load.counts) == pytest.approx(5 / 3)
    assert busiest((0, 0)) == 1.0
