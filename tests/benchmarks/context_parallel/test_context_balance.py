"""What ranks compute of attention, counted in the kernels that run: zigzag slices are even, contiguous ones
are not.
"""

from typing import Any

import pytest
import torch

from benchmarks.context_parallel.attention_call import Sizes, dense
from benchmarks.context_parallel.context_balance import (
    BAR,
    HOW,
    OTHERS,
    Case,
    Kernels,
    cases,
    counted,
    operations,
    packed,
    result,
    worst,
)
from meshwright.parallel.context import mask_blocks
from meshwright.parallel.context.mask_blocks import MaskRegion
from meshwright.parallel.context.ring import RingAttention


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
    deal = RingAttention(load_balance="contiguous").sequence_sharding
    monkeypatch.setattr(RingAttention, "sequence_sharding", lambda self, ranks: deal(ranks))
    assert result([counted_by_name("ring, zigzag", "causal")]).holds is False


def test_pairs_that_are_masked_are_counted_where_a_kernel_goes_through_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        mask_blocks,
        "find_regions",
        lambda low, high, *_: [MaskRegion((0, len(low)), (0, high.max()), "some")],
    )
    row = counted_by_name("ring, zigzag", "causal", 64)
    assert row["of one device"] > 1.5


def test_operations_by_hand() -> None:
    assert operations((2, 3, 5, 4), 7, 6, causal=False, back=False) == 2 * 3 * 35 * 2 * (4 + 6)
    assert operations((2, 3, 5, 4), 5, 6, causal=True, back=True) == 2 * 3 * 15 * 2 * (3 * 4 + 2 * 6)


def test_scores_outside_of_a_kernel_are_not_left_uncounted() -> None:
    with pytest.raises(RuntimeError, match="is not counted"), Kernels():
        dense(Sizes(tokens=5).call("none", torch.float32))


@pytest.mark.parametrize("mask", ["window", "documents", "packed 3"])
def test_striped_documents_and_windows_are_even_and_zigzag_ones_are_not(mask: str) -> None:
    even, uneven = (counted_by_name(how, mask, 2048) for how in ("ring, striped", "ring, zigzag"))
    assert worst(even) <= even["bar"] == OTHERS
    assert uneven["bar"] is None
    assert worst(uneven) > OTHERS
    causal = counted_by_name("ring, zigzag", "causal")
    assert result([causal, even]).holds is True
    assert result([causal, {**uneven, "bar": OTHERS}]).holds is False


def test_bars_are_for_what_is_to_be_even_and_others_are_shown() -> None:
    bars = {(case.how, case.mask.split()[0]): case.bar for case in cases()}
    assert {how for (how, mask), bar in bars.items() if bar == BAR} == {
        how for how in HOW if "contiguous" not in how
    }
    assert {how for (how, mask), bar in bars.items() if bar == OTHERS} == {"ring, striped", "hybrid, striped"}
    assert {mask for (how, mask), bar in bars.items() if bar == OTHERS} == {"window", "documents", "packed"}


def test_documents_that_begin_anywhere_are_unlike_in_each_row() -> None:
    mask = packed(0, 2, 200)
    assert not torch.equal(mask[0], mask[1])
    assert mask.diagonal(dim1=-2, dim2=-1).all()
    assert not mask.triu(1).any()
