"""Fits or not: labels said right, also by constants that were not found on them, and that a poor model is
noticed.
"""

from dataclasses import replace

import pytest

from benchmarks.planner.planner_fit import (
    Verdict,
    found_on,
    labelled,
    out_of_sample,
    result,
    same,
    share,
    verdicts,
)
from benchmarks.published_runs.rows import Run, read_runs
from meshwright.planner.analytic.framework_memory import GIB, FrameworkMemory


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return labelled(read_runs()[0])


def test_a_label_is_right_where_what_is_said_to_fit_ran(runs: list[Run]):
    ran, out = (replace(runs[0], status=status) for status in ("ok", "OOM"))
    assert Verdict(ran, 79 * GIB, 79.2 * GIB).right
    assert not Verdict(out, 79 * GIB, 79.2 * GIB).right
    assert not Verdict(out, 79 * GIB, 79.2 * GIB).trusted
    assert Verdict(out, 70 * GIB, 79.2 * GIB).trusted
    assert not Verdict(ran, 70 * GIB, 79.2 * GIB).trusted


def test_sources_that_publish_both_kinds_are_judged(runs: list[Run]):
    assert {run.source.split("/")[0] for run in runs} == {"Aleph-Alpha", "bigscience"}
    assert sum(run.source.startswith("Aleph-Alpha") for run in runs) == 585


def test_nineteen_of_twenty_labels_are_right(runs: list[Run]):
    found = verdicts(runs)
    assert share(found) > 0.97
    assert sum(each.trusted for each in found) <= 4
    assert result(found, []).holds is False  # three labels that contradict larger runs, and one of bigscience


def test_constants_found_on_one_half_hold_on_the_other(runs: list[Run]):
    some = [run for run in runs if run.source.startswith("Aleph-Alpha")]
    thin = [run for place, run in enumerate(some) if place % 3 == 0]
    folded = {each["found on"]: each["right"] for each in out_of_sample(thin)}
    assert set(folded) >= {"without", "half by hash", "the other half", "all but LLaMA-13B"}
    assert all(isinstance(right, float) and right > 0.9 for right in folded.values())


def test_half_a_file_with_norms_of_one_kind_gives_constants_for_both(runs: list[Run]):
    fused = [run for run in runs if run.layout.fused_norms and run.source.startswith("Aleph-Alpha")][:20]
    assert found_on(fused)[1] == 12
    assert found_on([])[0] == 4


def test_a_planner_that_divides_logits_which_are_whole_is_noticed(runs: list[Run]):
    """The planted bug: every tensor rank is taken to have its words alone."""

    def blind(habits: FrameworkMemory) -> FrameworkMemory:
        return replace(habits, shards_logits=True, logits_fragmentation=0)

    some = [run for run in runs if run.source.startswith("Aleph-Alpha")]
    found, worse = verdicts(some, same), verdicts(some, blind)
    assert share(worse) < share(found) - 0.03
    assert sum(each.trusted for each in worse) > 5 * sum(each.trusted for each in found)
