"""The formula of a norm is found by comparing results, and slices then give the numbers of the whole."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from meshwright.model.tensor_parallel.norm_formulas import (
    apply_norm,
    combine_statistics,
    find_norm_formula,
    norm_statistics,
)
from meshwright.plan.model_spec.tensor_parallel_layers import NormFormula

KNOWN = [
    (
        LlamaRMSNorm(6, 1e-6),
        NormFormula(subtracts_mean=False, eps=1e-6, weight_offset=0.0, normalized_size=6),
    ),
    (GemmaRMSNorm(6), NormFormula(subtracts_mean=False, eps=1e-6, weight_offset=1.0, normalized_size=6)),
    (nn.LayerNorm(6), NormFormula(subtracts_mean=True, eps=1e-5, weight_offset=0.0, normalized_size=6)),
    (
        nn.LayerNorm(6, bias=False),
        NormFormula(subtracts_mean=True, eps=1e-5, weight_offset=0.0, normalized_size=6),
    ),
    (nn.RMSNorm(6), NormFormula(subtracts_mean=False, eps=None, weight_offset=0.0, normalized_size=6)),
]


@pytest.mark.parametrize(("norm", "formula"), KNOWN, ids=lambda each: type(each).__name__)
def test_the_formula_is_found_and_slices_give_what_the_whole_does(norm: nn.Module, formula: NormFormula):
    assert find_norm_formula(norm) == formula
    norm, x = (
        norm.double(),
        torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    )
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    known = combine_statistics(
        formula, torch.cat([norm_statistics(formula, part) for part in x.chunk(3, -1)], -1)
    )
    bias = norm._parameters.get("bias")
    slices = [
        apply_norm(
            formula, x[:, i : i + 2], known, norm.weight[i : i + 2], None if bias is None else bias[i : i + 2]
        )
        for i in (0, 2, 4)
    ]
    own = apply_norm(formula, x, norm_statistics(formula, x), norm.weight, bias)
    assert torch.allclose(torch.cat(slices, -1), own, rtol=0, atol=1e-14)
    # a published norm casts to float32 by itself
    assert torch.allclose(own, norm(x), rtol=1e-6, atol=1e-6)


class Halved(LlamaRMSNorm):
    """Looks like one that is known, and is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 6), nn.BatchNorm1d(6), Halved(6)], ids=lambda each: type(each).__name__
)
def test_what_follows_no_formula_is_not_known_and_stays_as_it_was(norm: nn.Module):
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    assert find_norm_formula(norm) is None
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
