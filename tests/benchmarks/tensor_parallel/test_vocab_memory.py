"""What a rank holds of a divided vocabulary, at a small size: the plan's, at its fullest, at the start and
when it goes on.
"""

from pathlib import Path

import pytest

from benchmarks.tensor_parallel.vocab_memory import BAR, Case, lived, result, rows_of
from meshwright.testing.ranks import run_on_threads


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ranks_hold_what_the_plan_says(tied: bool, tmp_path: Path):
    case = Case(tied, words=8_003, hidden=32, ranks=3, tokens=8)
    rows = rows_of(case, run_on_threads(lambda world: lived(world, case, str(tmp_path)), case.mesh))
    assert len({row["loss"] for row in rows}) == 1
    for row in rows:
        assert all(off <= BAR for off in row["off"].values()), row
        assert abs(row["off"]["step"]) <= BAR, row


def test_a_peak_that_is_too_far_off_or_a_whole_table_at_the_start_fails_the_claim():
    row = {"off": {"step": -0.01, "kept": 0.0, "made": -0.2, "resumed": 0.0}}
    assert result([row]).holds is True
    assert result([row, {"off": {**row["off"], "step": 0.06}}]).holds is False
    assert result([row, {"off": {**row["off"], "made": 1.0}}]).holds is False
