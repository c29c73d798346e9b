"""Planted faults are found: in the plan by its checks, in the engine by other bits."""

import pytest

from benchmarks.memory.planted_offload_faults import FAULTS, is_found


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.edit])
def test_a_fault_in_the_plan_is_found(name: str):
    assert " does not wait for " in is_found(FAULTS[name]) or "allocate" in is_found(FAULTS[name])


def test_a_fault_in_the_engine_is_found():
    assert is_found(FAULTS["stale weights: what the host has stepped stays there"]) == "other bits"


def test_there_are_at_least_twelve():
    assert len(FAULTS) >= 12
