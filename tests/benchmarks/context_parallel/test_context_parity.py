"""A few cases of the parity of tokens on several ranks; a refused plan is shown with what was said, and
counts as a miss.
"""

import pytest
import torch

from benchmarks.context_parallel import context_models
from benchmarks.context_parallel.attention_call import MASKS, Sizes, dense, fused
from benchmarks.context_parallel.context_parity import (
    DEALS,
    LENGTHS,
    ROUNDINGS,
    TOLERANCE,
    Case,
    cases,
    compared,
    exact,
    gap,
    result,
)
from meshwright.parallel.context import head_exchange, ring_attention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh

ALONE = [
    Case("ring of 3", "documents", 7),
    Case("ring of 6", "bias", 3),
    Case("ulysses on 6", "padding", 37),
    Case("hybrid, 3 x 2", "prefix", 1),
    Case("hybrid, 2 x 3", "window", 37, "float32"),
]
MODELS = (
    "llama, ring of 3, line and sequence",
    "qwen3, hybrid, 2 x 2, ZeRO 3 and recompute",
    "vit, ulysses on 2, pipeline",
    "t5, unlike lengths, ring of 3, copies",
)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_attention_equals_the_formula(case: Case) -> None:
    row = compared(case)
    assert float(str(row["error"])) <= case.limit, row


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_device(name: str) -> None:
    row = compared(next(case for case in cases() if str(case) == name))
    assert float(str(row["error"])) <= TOLERANCE, row


def test_every_mask_length_and_model_is_compared_under_every_technique() -> None:
    names = [str(case) for case in cases()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("attention") for name in names) == len(DEALS) * len(MASKS) * (len(LENGTHS) + 1)
    for family in context_models.FAMILIES:
        some = len(context_models.SOME) * len(context_models.BESIDE)
        assert sum(name.startswith(f"{family}, ") for name in names) >= len(context_models.DEALS) + some


@pytest.mark.parametrize("mask", MASKS)
def test_the_formula_is_what_torch_computes(mask: str) -> None:
    call = Sizes(tokens=9).call(mask)
    assert gap(fused(call), dense(call)) < 1e-14
    rough = Sizes(tokens=9).call(mask, torch.float32)
    assert gap(fused(rough), dense(exact(rough))) < ROUNDINGS


def test_a_refused_plan_is_a_miss_and_says_why() -> None:
    refused = compared(
        context_models.Case("llama", "ulysses on 4", Mesh(cp=4), (Ulysses(), context_models.COPIES))
    )
    assert "6 heads" in str(refused["refused"])
    assert result([refused]).holds is False
    near = {"case": "attention, float32", "error": 1e-7}
    assert result([near]).holds is True
    assert result([near, {**near, "error": 1e-5}]).median == 1
    assert result([{"case": "attention, float64", "error": 1e-7}]).holds is False


def test_softmaxes_that_are_merged_wrongly_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ring_attention.merge_outputs
    monkeypatch.setattr(
        ring_attention,
        "merge_outputs",
        lambda out, lse, more, more_lse: right(out, lse, more, more_lse + 1e-6),
    )
    assert float(str(compared(Case("ring of 3", "causal", 7))["error"])) > TOLERANCE


def test_heads_that_are_dealt_to_the_wrong_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        head_exchange, "_head_indices", lambda rank, each: range((1 - rank) * each, (2 - rank) * each)
    )
    assert float(str(compared(Case("ulysses on 2", "causal", 7))["error"])) > TOLERANCE
