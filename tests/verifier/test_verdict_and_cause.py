"""Verdicts: their words, their causes, and the JSON that a script reads."""

import json
from dataclasses import asdict, replace
from math import inf, isnan, nan
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from meshwright.verifier.verdict_and_cause import (
    COMPARED_QUANTITIES,
    QUANTITIES,
    Difference,
    Verdict,
)

PASSED = Verdict(
    "abc",
    "dp_replicate 3",
    "llama",
    "threads",
    3,
    1e-10,
    True,
    dict.fromkeys(COMPARED_QUANTITIES, 1e-15),
    {"REDUCE(0)": 40},
)
GRADIENT = Difference(0, "gradient", "head.weight", "head", 2.0, 1, 3.0)
FAILED = replace(PASSED, passed=False, cause="loss scale", first_difference=GRADIENT, num_other_differences=4)


def difference(quantity: str, step: int = 0, factor: float | None = None) -> Difference:
    return Difference(step, quantity, "w", "b", 1.0, 0, factor)


@pytest.mark.parametrize("error", [2.0, nan, inf, None])
@pytest.mark.parametrize(
    "verdict", [PASSED, FAILED, replace(PASSED, passed=False, not_compared=("rank 1 did not report",))]
)
def test_a_verdict_survives_the_way_to_a_file_and_back(verdict: Verdict, error: float | None, tmp_path: Path):
    if verdict.first_difference is not None:
        verdict = replace(
            verdict,
            first_difference=replace(verdict.first_difference, error=error),
            max_errors={"gradient": error or 0.0},
        )
    path = tmp_path / "deep" / "verdict.json"
    verdict.write(path)
    back = TypeAdapter(Verdict).validate_json(path.read_bytes())
    assert repr(back) == repr(verdict)  # NaN is not equal to itself, but prints alike


def test_the_file_is_json_that_every_reader_takes(tmp_path: Path):
    """NaN and Infinity are no JSON: a strict reader would refuse the very verdicts that matter."""
    path = tmp_path / "verdict.json"
    replace(FAILED, first_difference=replace(GRADIENT, error=nan), max_errors={"loss": inf}).write(path)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    assert document["first_difference"]["error"] == "nan"
    assert document["max_errors"] == {"loss": "inf"}
    assert document["passed"] is False
    assert set(document) == set(asdict(FAILED))


def test_a_pass_says_what_is_allowed_and_how_close_it_came():
    assert str(PASSED).startswith(
        "dp_replicate 3 equals one device after 3 steps (largest relative errors: initial value 1e-15"
    )
    assert str(PASSED).endswith("allowed 1e-10)")


def test_a_failure_names_the_first_difference_and_its_cause():
    assert str(FAILED) == (
        "dp_replicate 3 does NOT equal one device (allowed 1e-10; cause: loss scale)\n"
        "  step 0: the gradient of head.weight in block head differs by 2 of the block's scale on rank 1\n"
        "  and 4 more differences"
    )


def test_a_comparison_that_was_not_made_does_not_read_as_one():
    text = str(
        replace(
            PASSED, passed=False, num_steps=0, cause="incomplete", not_compared=("rank 0 compared no step",)
        )
    )
    assert text == "dp_replicate 3 was NOT compared with one device: rank 0 compared no step"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Difference(2, "loss", "", "", 0.5, 0), "step 2: the loss differs by 0.5 on rank 0"),
        (Difference(0, "samples", "labels", "", None, 2), "step 0: the samples of labels differs on rank 2"),
        (
            Difference(1, "gradient", "w", "b", nan, 0),
            "step 1: the gradient of w in block b differs by nan of the block's scale",
        ),
    ],
)
def test_a_difference_says_where_and_by_how_much(given: Difference, message: str):
    assert str(given).startswith(message)


def test_causes_come_before_their_effects():
    assert tuple(each for each in QUANTITIES if each in COMPARED_QUANTITIES) == COMPARED_QUANTITIES
    order = [
        QUANTITIES.index(quantity)
        for quantity in (
            "initial value",
            "samples",
            "choice of experts",
            "gradient",
            "grad norm",
            "parameter",
        )
    ]
    assert order == sorted(order)


def test_nan_is_not_a_number_in_a_verdict_made_from_json():
    assert isnan(TypeAdapter(Difference).validate_python({**asdict(GRADIENT), "error": "nan"}).error)
