"""Resumes with what is owed and without: which plans there are, and when the claim holds."""

import json
from typing import Any

import pytest
import torch

from benchmarks.compression.compression_resume import (
    BATCH,
    DROPPED_UNDER,
    OTHERS,
    SAVED_STEP,
    STEPS,
    largest_difference,
    result,
)
from meshwright.plan.sharding.mesh import GRAD_SUM_AXES


def row(kept: float, dropped: float, difference: float = 0.0) -> dict[str, Any]:
    """Losses of one seed beside 2.0: every plan is a share `kept` above it, the last of them below it."""
    losses = dict.fromkeys(OTHERS, 2.0 * (1 + kept))
    losses[list(OTHERS)[-1]] = 2.0 * (1 - kept)
    sums = dict.fromkeys(OTHERS, difference)
    return {"undisturbed": 2.0, "kept": losses, "dropped": 2.0 * (1 + dropped), "difference_of_sums": sums}


@pytest.mark.parametrize(
    ("kept", "dropped", "difference", "holds"),
    [
        (0.0009, 0.005, 1e-7, True),
        (0.0011, 0.005, 1e-7, False),
        (0.0009, 0.0008, 1e-7, False),  # nothing was owed that matters
        (0.0009, 0.005, 1e-5, False),
    ],
)
def test_the_claim_holds_if_all_is_kept_and_matters(
    kept: float, dropped: float, difference: float, holds: bool
):
    found = result([row(kept, dropped, difference)] * 3)
    assert found.holds is holds
    assert found.median == pytest.approx(kept)
    assert found.detail["gap, residuals dropped"] == pytest.approx(dropped)
    assert json.dumps(found.detail)


def test_sums_differ_by_a_share_of_the_largest_element():
    owed = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([0.0])}
    assert largest_difference(owed, owed) == 0
    assert largest_difference({**owed, "a": torch.tensor([1.0, -3.0])}, owed) == 0.25
    assert largest_difference({"a": owed["a"]}, owed) == float("inf")
    assert largest_difference({}, {}) == float("inf")


def test_every_plan_shares_the_batch_evenly_and_saves_before_the_end():
    assert DROPPED_UNDER in OTHERS
    assert 0 < SAVED_STEP < STEPS
    for each in OTHERS.values():
        assert BATCH % each.mesh.group_size(GRAD_SUM_AXES) == 0
