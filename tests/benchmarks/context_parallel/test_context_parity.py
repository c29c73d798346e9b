"""A few cases of the parity of context parallelism; a refused plan counts as a miss, and
shows its message.
"""

import pytest
import torch

from benchmarks.context_parallel import context_models
from benchmarks.context_parallel.attention_call import MASKS, Sizes, reference_attention, torch_attention
from benchmarks.context_parallel.context_parity import (
    LENGTHS,
    ROUNDINGS,
    TECHNIQUES,
    TOLERANCE,
    Case,
    cases,
    compare,
    exact,
    relative_error,
    result,
)
from meshwright.parallel.context import ring_attention, ulysses_all_to_all
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh

ATTENTION_CASES = [
    Case("ring of 3", "documents", 7),
    Case("ring of 6", "bias", 3),
    Case("ulysses on 6", "padding", 37),
    Case("hybrid, 3 x 2", "prefix", 1),
    Case("hybrid, 2 x 3", "window", 37, "float32"),
]
MODELS = (
    "llama, ring of 3, tensor_parallel and sequence_parallel",
    "qwen3, hybrid, 2 x 2, ZeRO 3 and activation_checkpointing",
    "vit, ulysses on 2, pipeline",
    "t5, unequal lengths, ring of 3, ddp",
)


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_equals_the_formula(case: Case) -> None:
    row = compare(case)
    assert float(str(row["error"])) <= case.limit, row


@pytest.mark.parametrize("name", MODELS)
def test_a_model_equals_one_device(name: str) -> None:
    row = compare(next(case for case in cases() if str(case) == name))
    assert float(str(row["error"])) <= TOLERANCE, row


def test_every_mask_length_and_model_is_compared_under_every_technique() -> None:
    names = [str(case) for case in cases()]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("attention") for name in names) == len(TECHNIQUES) * len(MASKS) * (
        len(LENGTHS) + 1
    )
    for family in context_models.FAMILIES:
        some = len(context_models.COMBINED_TECHNIQUES) * len(context_models.COMBINED_WITH)
        assert sum(name.startswith(f"{family}, ") for name in names) >= len(context_models.TECHNIQUES) + some


@pytest.mark.parametrize("mask", MASKS)
def test_the_formula_equals_the_kernel_of_torch(mask: str) -> None:
    call = Sizes(tokens=9).call(mask)
    assert relative_error(torch_attention(call), reference_attention(call)) < 1e-14
    rough = Sizes(tokens=9).call(mask, torch.float32)
    assert relative_error(torch_attention(rough), reference_attention(exact(rough))) < ROUNDINGS


def test_a_refused_plan_is_a_miss_with_its_message() -> None:
    refused = compare(
        context_models.Case("llama", "ulysses on 4", Mesh(cp=4), (Ulysses(), context_models.CP_DDP))
    )
    assert "6 heads" in str(refused["refused"])
    assert result([refused]).holds is False
    exact_enough = {"case": "attention, float32", "error": 1e-7}
    assert result([exact_enough]).holds is True
    assert result([exact_enough, {**exact_enough, "error": 1e-5}]).median == 1
    assert result([{"case": "attention, float64", "error": 1e-7}]).holds is False


def test_wrongly_merged_softmaxes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = ring_attention.merge_outputs
    monkeypatch.setattr(
        ring_attention,
        "merge_outputs",
        lambda out, lse, more, more_lse: merge(out, lse, more, more_lse + 1e-6),
    )
    assert float(str(compare(Case("ring of 3", "causal", 7))["error"])) > TOLERANCE


def test_heads_on_the_wrong_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ulysses_all_to_all, "_head_indices", lambda rank, each: range((1 - rank) * each, (2 - rank) * each)
    )
    assert float(str(compare(Case("ulysses on 2", "causal", 7))["error"])) > TOLERANCE
