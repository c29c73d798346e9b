"""The benchmark of GRPO: one of its cases, and a fault that it notices."""

import pytest

from benchmarks.generation import grpo
from benchmarks.generation.grpo import CASES, compare_curves, compare_memory
from meshwright.engine.generation import token_sampler
from meshwright.testing.ranks import ProcessPool

NAMED = {case.name: case for case in CASES}


def test_all_sizes_of_the_claim_are_compared():
    assert {case.mesh.world_size for case in CASES} == {1, 2, 4}
    assert {case.gather for case in CASES} == {"once", "block"}


def test_rewards_are_those_of_one_device_and_seeds_by_rank_are_noticed(monkeypatch: pytest.MonkeyPatch):
    expected = grpo.curves_of(NAMED["one device"])[0]
    assert len(set(expected)) > 6
    assert compare_curves(NAMED["pp 2, ZeRO-3 on 2"], expected)["off"] <= 1e-10
    right, numbers = token_sampler.derive_key, iter(range(10**6))
    monkeypatch.setattr(token_sampler, "derive_key", lambda *labels: right(*labels, next(numbers)))
    assert compare_curves(NAMED["copies on 2"], expected)["off"] > 1e-3


def test_a_rollout_needs_its_cache_above_a_step_and_gathered_weights_are_noticed():
    with ProcessPool(2, shared_memory=False) as pool:
        by_block, once = (
            compare_memory(NAMED[f"ZeRO-3 on 2{how}"], pool) for how in (", block by block", "")
        )
    assert by_block["off"] == once["off"] == 0
    for one, other in zip(by_block["ranks"], once["ranks"], strict=True):
        assert other["rollout"] - one["rollout"] > one["cache and gathered weights"]
