"""expert_plans: its draws distribute experts, of all its models; refusals are no matches, and are counted."""

from collections.abc import Sequence
from itertools import islice

import pytest

from benchmarks.experts.expert_plans import compare, draws, result, rows_of
from benchmarks.experts.mixture_models import BIASED, MIXTURES
from benchmarks.random_plans.combinations import Row
from benchmarks.random_plans.random_draws import Draw


def test_draws_distribute_experts_of_all_models_and_with_all_techniques_of_the_claim():
    found = list(islice(draws(), 300))
    assert {each.model for each in found} == set(MIXTURES)
    assert all("expert_parallel" in each.techniques and not each.perturbation for each in found)
    with_biases = [each for each in found if "loss_free_balancing" in each.techniques]
    assert {each.model for each in with_biases} == set(BIASED)
    names = {name for each in found for name in each.techniques}
    assert names >= {"zero 1", "zero 2", "zero 3", "1f1b", "zb_v", "activation_checkpointing", "microbatches"}
    assert names >= {"expert_tensor_parallel", "tensor_parallel 1d", "ring", "ulysses", "ddp"}
    over = {each.over for drawn in found for each in drawn.strategies if each.name == "expert_parallel"}
    assert {("ep",), ("dp_shard",), ("cp",), ("tp",)} <= over


@pytest.mark.parametrize("model", ["DeepSeek-V3", "llama, GShard"])
def test_a_plan_of_two_ranks_equals_one_device(model: str):
    drawn = next(each for each in draws() if each.model == model and each.mesh.world_size < 4)
    assert compare(drawn)["outcome"] == "matched"


def test_refused_plans_are_drawn_again_and_counted():
    def compare_draws(chosen: Sequence[Draw]) -> list[Row]:
        outcomes = ("matched", "refused", "differs", "new reason")
        return [
            {"outcome": outcomes[each.number % 4], "model": each.model, "error": 0.0, "techniques": []}
            for each in chosen
        ]

    rows = rows_of(7, compare_draws)
    found = result(rows)
    assert len(found.values) == 7
    assert found.detail["refused"] == len(rows) - 7 > 0
    assert found.detail["matched"] == 7 - len(found.detail["findings"]) < 7
    assert not found.holds
