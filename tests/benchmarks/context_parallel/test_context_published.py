"""What the packages are held to: agreement in the parts in which they are oracles; and ours to the formula in
all.
"""

from typing import Any

import pytest

from benchmarks.context_parallel.context_published import OF, PARTS, result

NEAR: dict[str, Any] = {what: dict.fromkeys(PARTS, 1e-7) for what in ("theirs to ours", "ours", "theirs")}


@pytest.mark.parametrize("name", list(OF))
def test_cases_that_agree_hold(name: str) -> None:
    assert result({f"{name}, 2 ranks": NEAR}).holds is True


def test_parts_in_which_a_package_is_no_oracle_do_not_count() -> None:
    wrong = {**NEAR, "theirs to ours": {**NEAR["theirs to ours"], "key": 1.5}}
    assert result({"ring-attention-pytorch, 2 ranks": wrong}).holds is True
    assert result({"yunchang, ring, 2 ranks": wrong}).holds is False


def test_ours_has_to_be_right_in_every_part() -> None:
    wrong = {**NEAR, "ours": {**NEAR["ours"], "value": float("inf")}}
    assert result({"ring-attention-pytorch, 2 ranks": wrong}).holds is False
