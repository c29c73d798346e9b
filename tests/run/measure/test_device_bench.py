"""Each operation that `bench device` times is noted under the same name when a model runs it, with as many numbers."""

import pytest
import torch

from meshwright.model.trial.op_counter import Working
from meshwright.plan.model_spec.op_costs import RICH
from meshwright.run.measure.device_bench import computing

NUMEL, OPERATIONS = computing(torch.device("cpu"))


def test_all_that_compute_much_are_timed():
    assert set(OPERATIONS) == set(RICH)


@pytest.mark.parametrize("name", RICH)
def test_what_is_timed_is_what_a_trial_notes(name: str):
    working = Working(3)
    with working, working.within("loss"):
        OPERATIONS[name]()
    (found,) = [each for each in working.of("loss").passed if each.operation]
    assert (found.operation, found.numbers.at(3), found.count) == (name, NUMEL, 1)
