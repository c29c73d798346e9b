"""The benchmark at a small size: tiling saves the memory that the plan states, and a wrong plan fails."""

from dataclasses import replace

import pytest
import torch

from benchmarks.tensor_parallel.tiled_memory import (
    BAR,
    Case,
    Measurement,
    compare_to_plan,
    measure_rank,
    result,
)
from meshwright.comm.backends.threads import single_rank_world


def test_tiled_mlps_hold_the_bytes_of_the_plan_and_far_fewer_than_at_once():
    found = {
        tiles: measure_rank(
            single_rank_world(torch.device("cpu")), Case("one rank", 1, mlp_tiles=tiles, wide=True)
        )
        for tiles in (1, 8)
    }
    rows = compare_to_plan(Case("one rank", 1, mlp_tiles=8, wide=True), [found[8]])
    assert result(rows).holds
    assert 3 * found[8].step < found[1].step
    assert found[8].loss == pytest.approx(found[1].loss, rel=1e-5)


def test_a_peak_that_the_plan_does_not_know_fails():
    case = Case("one rank", 8)
    (row,) = compare_to_plan(case, [Measurement(1, 1, 0.0)])
    planned = row["plan_peak"]
    assert isinstance(planned, int)
    too_high = Measurement(round(planned * (1 + 2 * BAR)), 1, 0.0)
    assert not result(compare_to_plan(case, [too_high])).holds
    assert result(compare_to_plan(case, [replace(too_high, step=planned)])).holds
