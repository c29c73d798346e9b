"""Operations timed by `bench device` have the names and sizes that a trial counts."""

import pytest
import torch

from meshwright.model.trial.op_counter import OpCounter
from meshwright.plan.model_spec.op_sizes_and_memory import COMPUTE_HEAVY_OPS
from meshwright.run.measure.device_bench import compute_heavy_operations

NUMEL, OPERATIONS = compute_heavy_operations(torch.device("cpu"))


def test_all_that_compute_much_are_timed():
    assert set(OPERATIONS) == set(COMPUTE_HEAVY_OPS)


@pytest.mark.parametrize("name", COMPUTE_HEAVY_OPS)
def test_what_is_timed_is_what_a_trial_notes(name: str):
    working = OpCounter(3)
    with working, working.section("loss"):
        OPERATIONS[name]()
    (found,) = [each for each in working.section_work("loss").memory_ops if each.operation]
    assert (found.operation, found.output_numel.total(3), found.count) == (name, NUMEL, 1)
