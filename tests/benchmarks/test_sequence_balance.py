"""What ranks compute of attention, counted in the kernels that run: zigzag slices are even, contiguous ones are not."""

from typing import Any

import pytest
import torch

from benchmarks.attention import Sizes, dense
from benchmarks.sequence_balance import BAR, Case, Kernels, cases, counted, operations, result, worst
from meshwright.strategies.sequence import rounds
from meshwright.strategies.sequence.ring import Ring


def counted_by_name(how: str, mask: str, tokens: int = 515) -> Any:
    return counted(Case(how, mask, tokens))


@pytest.mark.parametrize("how", ["ring, zigzag", "ulysses", "hybrid, zigzag"])
def test_no_rank_has_more_than_its_share(how: str) -> None:
    row = counted_by_name(how, "causal")
    assert worst(row) <= BAR
    assert row["of one device"] == pytest.approx(1.0, abs=0.01)
    assert result([row]).holds is True


def test_contiguous_slices_cost_the_last_rank_1_75_times_the_mean() -> None:
    row = counted_by_name("ring, contiguous", "causal", 512)
    assert worst(row) == pytest.approx(1.75, abs=0.01)
    assert row["bar"] is None
    assert result([{**row, "bar": BAR}]).holds is False


def test_an_even_deal_that_is_given_up_fails_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    deal = Ring(balance="contiguous").deal
    monkeypatch.setattr(Ring, "deal", lambda self, ranks: deal(ranks))
    assert result([counted_by_name("ring, zigzag", "causal")]).holds is False


def test_pairs_that_are_masked_are_counted_where_a_kernel_goes_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_by_position", lambda *of: "some")
    row = counted_by_name("ring, zigzag", "causal", 64)
    assert row["of one device"] > 1.9


def test_operations_by_hand() -> None:
    assert operations((2, 3, 5, 4), 7, 6, causal=False, back=False) == 2 * 3 * 35 * 2 * (4 + 6)
    assert operations((2, 3, 5, 4), 5, 6, causal=True, back=True) == 2 * 3 * 15 * 2 * (3 * 4 + 2 * 6)


def test_scores_outside_of_a_kernel_are_not_left_uncounted() -> None:
    with pytest.raises(RuntimeError, match="is not counted"), Kernels():
        dense(Sizes(tokens=5).call("none", torch.float32))


def test_causal_rows_have_a_bar_and_others_are_shown() -> None:
    assert {case.mask for case in cases() if case.counts} == {"causal"}
    assert {case.mask for case in cases() if not case.counts} == {"causal", "none", "window", "documents"}
