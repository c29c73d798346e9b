"""A verdict tells faults of the user's code from those of the technique."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from meshwright.model.loss.loss_definition import Batch
from meshwright.verifier.divergence_cause import apparent_cause, find_cause
from meshwright.verifier.verdict_and_cause import Difference
from tests.tiny_model import analyzed_model, case_of, plan_of


def difference(quantity: str, step: int = 0, factor: float | None = None) -> Difference:
    return Difference(step, quantity, "w", "b", 1.0, 0, factor)


@pytest.mark.parametrize(
    ("differences", "cause"),
    [
        ([], ""),
        ([difference("initial value"), difference("samples"), difference("gradient", factor=3.0)], "init"),
        ([difference("gradient", factor=3.0), difference("samples")], "data"),
        (
            [difference("gradient", factor=3.0), difference("gradient", factor=3.0), difference("loss")],
            "loss scale",
        ),
        ([difference("gradient", factor=3.0), difference("gradient")], "technique"),
        ([difference("gradient", factor=3.0), difference("gradient", factor=2.0)], "technique"),
        ([difference("gradient"), difference("loss")], "technique"),
        ([difference("loss")], "technique"),
        ([difference("replica")], "technique"),
        ([difference("ledger")], "plan"),
        ([difference("gradient", 1, 0.5), difference("gradient", 2)], "loss scale"),
        ([difference("gradient", 2, 0.5), difference("gradient", 1)], "technique"),
        ([difference("gradient", 0), difference("samples", 2)], "technique"),
        ([difference("gradient", 1, 0.5), difference("samples", 2)], "loss scale"),
    ],
)
def test_the_cause_is_that_of_the_earliest_differences(differences: list[Difference], cause: str):
    assert apparent_cause(differences) == cause
    assert apparent_cause(differences[::-1]) == cause


ANALYZED = analyzed_model()
CASE = case_of(ANALYZED, plan_of(ANALYZED, 2))
DIFFERS = [difference("gradient")]


def test_a_plan_that_differs_where_one_device_does_not_is_a_fault_of_the_technique():
    assert find_cause(DIFFERS, CASE) == "technique"


def test_a_forward_that_draws_by_itself_is_told_as_randomness():
    draws = itertools.count(1)

    def noisy(outputs: Any, batch: Batch) -> torch.Tensor:
        return CASE.loss.total(outputs, batch) * next(draws)

    assert find_cause(DIFFERS, replace(CASE, loss=replace(CASE.loss, total=noisy))) == "randomness"


def test_a_loss_that_couples_samples_is_told_as_loss():
    def coupled(outputs: Any, batch: Batch) -> torch.Tensor:
        total = CASE.loss.total(outputs, batch)
        return total * total

    assert find_cause(DIFFERS, replace(CASE, loss=replace(CASE.loss, total=coupled))) == "loss"
