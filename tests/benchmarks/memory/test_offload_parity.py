"""One plan is compared to the bit, and a copy that is lost is found."""

from itertools import islice

import pytest

from benchmarks.memory import offload_parity
from benchmarks.memory.planted_offload_faults import losing
from meshwright.parallel.memory.tiers.offload import Offload


def test_every_draw_has_offload_and_what_is_compared_is_equal():
    some = list(islice(offload_parity.draws(), 60))
    assert all(offload_parity.offload_of(each) for each in some)
    drawn = next(each for each in some if each.mesh.world_size == 2)
    left = offload_parity.without_offload(drawn).strategies
    assert not any(isinstance(each, offload_parity.LEAVING) for each in left)
    row = offload_parity.compare(drawn)
    assert (row["outcome"], row["other_bits"]) == ("matched", []), row


def test_other_bits_are_told_by_name():
    found = (each for each in islice(offload_parity.draws(), 30) if each.mesh.world_size == 2)
    drawn = next(
        each for each in found if "host steps" in offload_parity.mode_of(offload_parity.offload_of(each))
    )
    with losing("FETCH_PARAM", lambda pairs: pairs[1:]):
        assert offload_parity.other_bits(drawn)


def test_a_result_holds_only_if_every_plan_and_fault_was_found():
    row = {"case": "", "mode": "host", "outcome": "matched", "error": 1e-15, "techniques": ["ddp"]}
    rows = [row] * offload_parity.NUM_PLANS
    assert offload_parity.result(rows, {"a": "other bits"}).holds
    assert not offload_parity.result(rows, {"a": ""}).holds
    assert not offload_parity.result([*rows[1:], {**row, "outcome": "other bits"}], {"a": "x"}).holds


@pytest.mark.parametrize("step_on", ["device", "host"])
def test_modes_are_named(step_on: str):
    assert offload_parity.mode_of(Offload(step_on=step_on)) == f"optimizer_states, {step_on} steps"
