"""The plans of `planner_offload` cover every tier, and the rate of the disk is measured as plans use it."""

from pathlib import Path
from unittest.mock import patch

from benchmarks.planner import planner_offload
from benchmarks.planner.twelve_plans import OFFLOADED_CASES, analyze_and_plan
from meshwright.planner.program_cost.rank_memory import state_bytes


def test_the_plans_keep_states_weights_and_activations_in_other_tiers():
    tiers = [analyze_and_plan(case)[1].sharding.tiers for case in OFFLOADED_CASES.values()]
    assert {each.optimizer_states for each in tiers} == {"device", "host", "disk"}
    assert {each.weights for each in tiers} == {"device", "host", "disk"}
    assert {each.activations for each in tiers} == {"device", "host"}
    assert {each.step for each in tiers} == {"device", "host"}


def test_weights_on_disk_leave_none_on_the_device():
    _, plan = analyze_and_plan(OFFLOADED_CASES["llama, ZeRO 3 on 2, states and weights on disk"])
    disk = state_bytes(plan, 0, "disk")
    assert min(disk.parameters, disk.optimizer_states) > 0
    assert state_bytes(plan, 0).parameters == 0


def test_the_rate_of_a_disk_is_that_of_all_files_at_once(tmp_path: Path):
    with (
        patch.object(planner_offload, "RATE_NBYTES", 1 << 16),
        patch.object(planner_offload, "RATE_PIECE", 1 << 14),
    ):
        assert planner_offload.disk_rate(str(tmp_path), 2) > 0
    assert not list(tmp_path.iterdir())
