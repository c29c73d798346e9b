"""The benchmark of tiles at a small size: tiles spare what the plan says, and a wrong plan fails."""

from dataclasses import replace

import pytest
import torch

from benchmarks.tensor_parallel.tiled_memory import BAR, Case, Found, lived, result, rows_of
from meshwright.api import single_rank_world


def test_mlps_in_tiles_hold_what_the_plan_says_and_far_less_than_at_once():
    found = {
        mlp: lived(single_rank_world(torch.device("cpu")), Case("alone", 1, mlp=mlp, wide=True))
        for mlp in (1, 8)
    }
    rows = rows_of(Case("alone", 1, mlp=8, wide=True), [found[8]])
    assert result(rows).holds
    assert 3 * found[8].step < found[1].step
    assert found[8].loss == pytest.approx(found[1].loss, rel=1e-5)


def test_a_peak_that_the_plan_does_not_know_fails():
    case = Case("alone", 8)
    (row,) = rows_of(case, [Found(1, 1, 0.0)])
    said = row["plan_peak"]
    assert isinstance(said, int)
    much = Found(round(said * (1 + 2 * BAR)), 1, 0.0)
    assert not result(rows_of(case, [much])).holds
    assert result(rows_of(case, [replace(much, step=said)])).holds
