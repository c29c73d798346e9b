"""Scores of models with experts: constants are found, and a row that is held out has no part in its own."""

from dataclasses import replace

import pytest

from benchmarks.planner.planner_experts import (
    ExpertConstants,
    code_base,
    fit_constants,
    held_out_errors,
    predicted_s,
    relative_errors,
    timed_runs,
)
from benchmarks.published_runs.rows import RUNS, Run


@pytest.fixture(scope="module")
def bridge() -> list[Run]:
    """Rows of one age of Megatron-Bridge, on hosts with a Grace CPU."""
    runs = timed_runs(RUNS)[0]
    return [run for run in runs if code_base(run) == ("Megatron-Bridge", "25.11", "Grace")][:8]


def test_ages_of_a_container_and_hosts_are_code_bases_of_their_own():
    runs, skipped = timed_runs(RUNS)
    assert (len(runs), len(skipped)) == (105, 9)
    ages = {code_base(run)[1:] for run in runs if run.source == "Megatron-Bridge"}
    assert ages == {(age, host) for age in ("25.09", "25.11", "26.06") for host in ("Grace", "x86")}


def test_constants_that_made_the_rows_predict_them(bridge: list[Run]):
    true = ExpertConstants(matmul=0.6, row_passes=9.0, exposed=0.5, launches=1.6)
    made = [replace(run, seconds=predicted_s(run, true)) for run in bridge]
    errors = relative_errors(made, fit_constants(made))
    assert max(map(abs, errors.values())) < 0.03
    assert max(map(abs, relative_errors(made, {}).values())) > 0.1


def test_a_row_that_is_held_out_has_no_part_in_its_own_prediction(bridge: list[Run]):
    held = held_out_errors(bridge, lambda run: run.key)
    slow = [replace(bridge[0], seconds=3 * (bridge[0].seconds or 1.0)), *bridge[1:]]
    after = held_out_errors(slow, lambda run: run.key)
    assert after[bridge[0].key] == pytest.approx((1 + held[bridge[0].key]) / 3 - 1)
