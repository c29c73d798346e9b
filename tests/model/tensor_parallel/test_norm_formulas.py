"""The formula of a norm is found by trying it, and slices of rows give the numbers of the whole."""

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from meshwright.model.tensor_parallel.norm_formulas import applied, formula_of, joined, statistics
from meshwright.plan.model_spec.layer_calls import Formula

KNOWN = [
    (LlamaRMSNorm(6, 1e-6), Formula(centred=False, eps=1e-6, offset=0.0, width=6)),
    (GemmaRMSNorm(6), Formula(centred=False, eps=1e-6, offset=1.0, width=6)),
    (nn.LayerNorm(6), Formula(centred=True, eps=1e-5, offset=0.0, width=6)),
    (nn.LayerNorm(6, bias=False), Formula(centred=True, eps=1e-5, offset=0.0, width=6)),
    (nn.RMSNorm(6), Formula(centred=False, eps=None, offset=0.0, width=6)),
]


@pytest.mark.parametrize(("norm", "formula"), KNOWN, ids=lambda each: type(each).__name__)
def test_the_formula_is_found_and_slices_give_what_the_whole_does(norm: nn.Module, formula: Formula):
    assert formula_of(norm) == formula
    norm, x = norm.double(), torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(0.5, 1.5)
    known = joined(formula, torch.cat([statistics(formula, part) for part in x.chunk(3, -1)], -1))
    bias = norm._parameters.get("bias")
    slices = [
        applied(formula, x[:, i : i + 2], known, norm.weight[i : i + 2], None if bias is None else bias[i : i + 2])
        for i in (0, 2, 4)
    ]
    own = applied(formula, x, statistics(formula, x), norm.weight, bias)
    assert torch.allclose(torch.cat(slices, -1), own, rtol=0, atol=1e-14)
    # a published norm casts to float32 by itself
    assert torch.allclose(own, norm(x), rtol=1e-6, atol=1e-6)


class Halved(LlamaRMSNorm):
    """Looks like one that is known, and is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.BatchNorm1d(6), Halved(6)], ids=lambda each: type(each).__name__)
def test_what_follows_no_formula_is_not_known_and_stays_as_it_was(norm: nn.Module):
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    assert formula_of(norm) is None
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
