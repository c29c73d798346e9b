"""The cost of an analysis: its forwards are counted, and trees are compared by their best processes."""

import torch
from torch import nn

from benchmarks.models.analysis_cost import FAMILY_NAMES, LARGE, _analyze, _row
from benchmarks.models.model_families import FAMILIES


def test_the_families_are_those_of_model_coverage():
    assert len(FAMILY_NAMES) == 12
    assert {*FAMILY_NAMES} <= {family.name for family in FAMILIES}


def test_forwards_of_the_whole_model_are_counted():
    seconds, forwards = _analyze(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), {"input": torch.ones(2, 3)}
    )
    assert seconds > 0
    assert forwards >= 3  # two batch sizes, and memory


def test_a_ratio_is_of_the_fewest_seconds_and_twins_are_of_one_tree():
    rounds = {
        "before": [{LARGE: [4.0, 9]}, {LARGE: [5.0, 9]}],
        "after": [{LARGE: [3.0, 7]}, {LARGE: [2.0, 7]}],
    }
    row = _row(LARGE, rounds)
    assert (row["ratio"], row["twin_ratio"]) == (0.5, 1.5)
    assert row["forwards"] == {"before": 9, "after": 7}
