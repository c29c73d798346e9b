"""Fits or not: share of correct predictions, also with constants fitted on other rows; a poor model is
noticed.
"""

from dataclasses import replace

import pytest

from benchmarks.planner.planner_fit import (
    FitPrediction,
    fit_constants,
    labelled_runs,
    out_of_sample,
    predict_fit,
    result,
    share_correct,
    unchanged,
)
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.memory_coefficients import GIB, FrameworkMemory


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return labelled_runs(read_runs()[0])


def test_a_prediction_is_correct_if_a_run_predicted_to_fit_ran(runs: list[Run]):
    ran, out = (replace(runs[0], status=status) for status in ("ok", "OOM"))
    assert FitPrediction(ran, 79 * GIB, 79.2 * GIB).is_correct
    assert not FitPrediction(out, 79 * GIB, 79.2 * GIB).is_correct
    assert not FitPrediction(out, 79 * GIB, 79.2 * GIB).wrongly_trusted
    assert FitPrediction(out, 70 * GIB, 79.2 * GIB).wrongly_trusted
    assert not FitPrediction(ran, 70 * GIB, 79.2 * GIB).wrongly_trusted


def test_sources_that_publish_both_outcomes_are_scored(runs: list[Run]):
    assert {run.source.split("/")[0] for run in runs} == {"Aleph-Alpha", "bigscience"}
    assert sum(run.source.startswith("Aleph-Alpha") for run in runs) == 585


def test_nineteen_of_twenty_predictions_are_correct(runs: list[Run]):
    found = predict_fit(runs)
    assert share_correct(found) > 0.97
    assert sum(each.wrongly_trusted for each in found) <= 4
    assert result(found, []).holds is False  # three labels that contradict larger runs, and one of bigscience


def test_constants_fitted_on_one_half_hold_on_the_other(runs: list[Run]):
    some = [run for run in runs if run.source.startswith("Aleph-Alpha")]
    thin = [run for place, run in enumerate(some) if place % 3 == 0]
    folded = {each["found on"]: each["right"] for each in out_of_sample(thin)}
    assert set(folded) >= {"without", "half by hash", "the other half", "all but LLaMA-13B"}
    assert all(isinstance(is_correct, float) and is_correct > 0.9 for is_correct in folded.values())


def test_half_a_file_with_norms_of_one_kind_gives_constants_for_both(runs: list[Run]):
    fused = [run for run in runs if run.layout.fused_norms and run.source.startswith("Aleph-Alpha")][:20]
    assert fit_constants(fused)[1] == 12
    assert fit_constants([])[0] == 4


def test_a_planner_that_shards_logits_which_are_full_is_noticed(runs: list[Run]):
    """The planted bug: logits are taken to be sharded by vocabulary."""

    def blind(memory: FrameworkMemory) -> FrameworkMemory:
        return replace(memory, shards_logits=True, logits_fragmentation=0)

    some = [run for run in runs if run.source.startswith("Aleph-Alpha")]
    found, worse = predict_fit(some, unchanged), predict_fit(some, blind)
    assert share_correct(worse) < share_correct(found) - 0.03
    assert sum(each.wrongly_trusted for each in worse) > 5 * sum(each.wrongly_trusted for each in found)
