"""Packages must agree with ours in the tensors for which they are oracles, and ours with
the formula in all.
"""

from typing import Any

import pytest

from benchmarks.context_parallel.context_published import ORACLES, TENSORS, result

AGREEING: dict[str, Any] = {
    what: dict.fromkeys(TENSORS, 1e-7) for what in ("package to ours", "ours", "package")
}


@pytest.mark.parametrize("name", list(ORACLES))
def test_cases_that_agree_hold(name: str) -> None:
    assert result({f"{name}, 2 ranks": AGREEING}).holds is True


def test_tensors_for_which_a_package_is_no_oracle_do_not_count() -> None:
    wrong = {**AGREEING, "package to ours": {**AGREEING["package to ours"], "key": 1.5}}
    assert result({"ring-attention-pytorch, 2 ranks": wrong}).holds is True
    assert result({"yunchang, ring, 2 ranks": wrong}).holds is False


def test_ours_must_match_the_formula_in_every_tensor() -> None:
    wrong = {**AGREEING, "ours": {**AGREEING["ours"], "value": float("inf")}}
    assert result({"ring-attention-pytorch, 2 ranks": wrong}).holds is False
