"""Load balance of attention, counted in the kernels that run: zigzag slices are even, contiguous ones are
not.
"""

from typing import Any

import pytest
import torch

from benchmarks.context_parallel.attention_call import Sizes, reference_attention
from benchmarks.context_parallel.context_balance import (
    BAR,
    OTHERS,
    TECHNIQUES,
    Case,
    KernelCounter,
    cases,
    count_case,
    operations,
    packed,
    result,
    worst_imbalance,
)
from meshwright.parallel.context import block_mask
from meshwright.parallel.context.block_mask import MaskRegion
from meshwright.parallel.context.ring import RingAttention


def count_named_case(technique: str, mask: str, tokens: int = 515) -> Any:
    return count_case(Case(technique, mask, tokens))


@pytest.mark.parametrize("technique", ["ring, zigzag", "ulysses", "hybrid, zigzag"])
def test_no_rank_has_more_than_its_share(technique: str) -> None:
    row = count_named_case(technique, "causal")
    assert worst_imbalance(row) <= BAR
    assert row["of one device"] == pytest.approx(1.0, abs=0.01)
    assert result([row]).holds is True


def test_contiguous_slices_cost_the_last_rank_1_75_times_the_mean() -> None:
    row = count_named_case("ring, contiguous", "causal", 512)
    assert worst_imbalance(row) == pytest.approx(1.75, abs=0.01)
    assert row["bar"] is None
    assert result([{**row, "bar": BAR}]).holds is False


def test_contiguous_sharding_instead_of_zigzag_fails_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    contiguous = RingAttention(load_balance="contiguous").sequence_sharding
    monkeypatch.setattr(RingAttention, "sequence_sharding", lambda self, ranks: contiguous(ranks))
    assert result([count_named_case("ring, zigzag", "causal")]).holds is False


def test_masked_pairs_that_a_kernel_computes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        block_mask,
        "find_regions",
        lambda low, high, *_: [MaskRegion((0, len(low)), (0, high.max()), "some")],
    )
    row = count_named_case("ring, zigzag", "causal", 64)
    assert row["of one device"] > 1.5


def test_operations_of_small_calls() -> None:
    assert operations((2, 3, 5, 4), 7, 6, causal=False, back=False) == 2 * 3 * 35 * 2 * (4 + 6)
    assert operations((2, 3, 5, 4), 5, 6, causal=True, back=True) == 2 * 3 * 15 * 2 * (3 * 4 + 2 * 6)


def test_scores_outside_of_a_kernel_raise() -> None:
    with pytest.raises(RuntimeError, match="is not counted"), KernelCounter():
        reference_attention(Sizes(tokens=5).call("none", torch.float32))


@pytest.mark.parametrize("mask", ["window", "documents", "packed 3"])
def test_striped_documents_and_windows_are_even_and_zigzag_ones_are_not(mask: str) -> None:
    even, uneven = (
        count_named_case(technique, mask, 2048) for technique in ("ring, striped", "ring, zigzag")
    )
    assert worst_imbalance(even) <= even["bar"] == OTHERS
    assert uneven["bar"] is None
    assert worst_imbalance(uneven) > OTHERS
    causal = count_named_case("ring, zigzag", "causal")
    assert result([causal, even]).holds is True
    assert result([causal, {**uneven, "bar": OTHERS}]).holds is False


def test_balanced_techniques_have_a_bar_and_others_are_shown() -> None:
    bars = {(case.technique, case.mask.split()[0]): case.bar for case in cases()}
    assert {technique for (technique, mask), bar in bars.items() if bar == BAR} == {
        technique for technique in TECHNIQUES if "contiguous" not in technique
    }
    assert {technique for (technique, mask), bar in bars.items() if bar == OTHERS} == {
        "ring, striped",
        "hybrid, striped",
    }
    assert {mask for (technique, mask), bar in bars.items() if bar == OTHERS} == {
        "window",
        "documents",
        "packed",
    }


def test_packed_documents_differ_from_sample_to_sample() -> None:
    mask = packed(0, 2, 200)
    assert not torch.equal(mask[0], mask[1])
    assert mask.diagonal(dim1=-2, dim2=-1).all()
    assert not mask.triu(1).any()
