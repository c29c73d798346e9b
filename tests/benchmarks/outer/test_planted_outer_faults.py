"""One fault of each way is found, and a plan without a fault has none."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from benchmarks.outer.planted_outer_faults import FAULTS, is_found

IN_PLAN, IN_ENGINE = "the average of a group is lost", "sign of the outer gradient"
FORGOTTEN = "outer momentum is not saved"


@pytest.mark.parametrize("name", [IN_PLAN, IN_ENGINE, FORGOTTEN])
def test_a_fault_is_found(name: str):
    assert is_found(FAULTS[name])


def test_nothing_is_found_without_a_fault():
    assert not is_found(replace(FAULTS[IN_PLAN], edit=lambda actions: actions))
    assert not is_found(replace(FAULTS[IN_ENGINE], plant=nullcontext))
    assert not is_found(replace(FAULTS[FORGOTTEN], forgets="nothing of this name"))
