"""Random plans with distributed experts."""

from random import Random

import pytest

from benchmarks.random_plans.expert_draws import with_experts
from benchmarks.random_plans.random_draws import MAX_RANKS, draw
from benchmarks.random_plans.random_plans import try_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.memory.tiled_mlp import TiledMLP
from meshwright.plan.sharding.mesh import Mesh


def test_a_plan_keeps_its_strategies_and_gets_an_axis():
    before = (BatchSplit("dp_shard"), ZeRO(stage=2))
    found = with_experts(Random(0), Mesh(dp_shard=3), before, MAX_RANKS)
    assert found is not None
    mesh, strategies = found
    assert mesh.ep in (2, 3)
    assert mesh.dp_shard == 3
    assert set(strategies) == {*before, ExpertParallel(), BatchSplit("ep")}


def test_what_cannot_be_combined_is_left_as_it_is():
    assert with_experts(Random(0), Mesh(cp=3), (TiledMLP(2),), MAX_RANKS) is None
    assert with_experts(Random(0), Mesh(dp_shard=20), (BatchSplit("dp_shard"), ZeRO()), MAX_RANKS) is None


@pytest.mark.parametrize("number", [4, 116])
def test_a_drawn_plan_with_experts_equals_one_device(number: int):
    drawn = next(
        each
        for each in (draw(9, at) for at in range(number, number + 60))
        if "expert_parallel" in each.techniques and not each.perturbation
    )
    row = try_plan(drawn)
    assert row["outcome"] == "matched", row
