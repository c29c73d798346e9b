"""Tiers are a closed list, and nothing is offloaded unless a plan says so."""

from dataclasses import astuple
from typing import get_args

from meshwright.plan.hardware.memory_tiers import MEMORY_TIERS, ON_DEVICE, MemoryTier, MemoryTiers


def test_everything_rests_and_is_stepped_on_the_device_by_default():
    assert get_args(MemoryTier) == MEMORY_TIERS
    assert set(astuple(ON_DEVICE)) == {"device", 0, ""}  # no delay, no folder
    assert not ON_DEVICE.host_steps_copy(is_stored_sharded=True)


def test_the_host_steps_copies_of_weights_that_stay_on_the_device():
    weights_stay, all_leave = (
        MemoryTiers(optimizer_states="host", weights=tier, step="host") for tier in ("device", "host")
    )
    assert weights_stay.host_steps_copy(is_stored_sharded=True)
    assert not all_leave.host_steps_copy(is_stored_sharded=True)
    assert all_leave.host_steps_copy(is_stored_sharded=False)
    assert not MemoryTiers(optimizer_states="host").host_steps_copy(is_stored_sharded=False)
