"""Live bytes of a rank under vocabulary parallelism at a small size: the plan's, at the peak, at the start
and after a resume.
"""

from pathlib import Path

import pytest

from benchmarks.tensor_parallel.vocab_memory import BAR, Case, compare_to_plan, measure_rank, result
from meshwright.testing.ranks import run_on_threads


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_ranks_hold_the_bytes_of_the_plan(tied: bool, tmp_path: Path):
    case = Case(tied, vocab_size=8_003, hidden=32, ranks=3, tokens=8)
    measured = run_on_threads(lambda world: measure_rank(world, case, str(tmp_path)), case.mesh)
    rows = compare_to_plan(case, measured)
    assert len({row["loss"] for row in rows}) == 1
    for row in rows:
        assert all(off <= BAR for off in row["off"].values()), row
        assert abs(row["off"]["step"]) <= BAR, row


def test_a_peak_that_is_too_far_off_or_a_whole_table_at_the_start_fails_the_claim():
    row = {"off": {"step": -0.01, "kept": 0.0, "made": -0.2, "resumed": 0.0}}
    assert result([row]).holds is True
    assert result([row, {"off": {**row["off"], "step": 0.06}}]).holds is False
    assert result([row, {"off": {**row["off"], "made": 1.0}}]).holds is False
