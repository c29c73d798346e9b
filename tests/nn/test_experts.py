"""Experts: the interface and the numbers of transformers' experts, and rows without an expert."""

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from meshwright.nn import ExpertMLP, Experts
from meshwright.nn import experts as experts_module
from meshwright.nn.grouped_linear import grouped_linear

TOKENS, WIDTH, INTERMEDIATE, NUM_EXPERTS, K = 7, 8, 12, 4, 3


def routes(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    index = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).argsort(1)[:, :K]
    return hidden, index, torch.rand(TOKENS, K, generator=generator).to(dtype)


def test_experts_compute_what_those_of_transformers_do_with_the_same_weights():
    sizes = {"hidden_size": WIDTH, "intermediate_size": INTERMEDIATE, "num_local_experts": NUM_EXPERTS}
    theirs = MixtralExperts(transformers.MixtralConfig(**sizes, experts_implementation="eager")).double()
    ours = Experts(WIDTH, INTERMEDIATE, NUM_EXPERTS, ExpertMLP()).double()
    theirs.load_state_dict(ours.state_dict())
    outputs = [each(*routes()) for each in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=1e-13, atol=1e-13)
    grads = [
        torch.autograd.grad(output.square().sum(), list(each.parameters()))
        for output, each in zip(outputs, (ours, theirs), strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


def undefined_behind_groups(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product, with NaN where its result and its gradient are undefined."""
    is_behind = (torch.arange(len(rows)) >= ends[-1]).unsqueeze(-1)
    rows = rows.clone()
    rows.register_hook(lambda grad: grad.masked_fill(is_behind, torch.nan))
    return grouped_linear(rows, weight, ends).masked_fill(is_behind, torch.nan)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mlp", [ExpertMLP(), ExpertMLP("relu", gated=False, bias=True)], ids=str)
def test_an_index_of_no_expert_adds_nothing_and_passes_no_undefined_number_on(mlp, dtype, monkeypatch):
    monkeypatch.setattr(experts_module, "grouped_linear", undefined_behind_groups)
    torch.manual_seed(1)
    experts = Experts(WIDTH, INTERMEDIATE, NUM_EXPERTS, mlp).to(dtype)
    hidden, index, weights = routes(dtype)
    leaves = [hidden.requires_grad_(), *experts.parameters()]
    expected = experts(hidden, index[:, :1], weights[:, :1])
    # of three choices two are of no expert, with weights that would show
    index[:, 1:], weights[:, 1:] = NUM_EXPERTS, 7.0
    weights.requires_grad_()
    found = experts(hidden, index, weights)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(each.sum(), leaves, retain_graph=True) for each in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)
    (grad,) = torch.autograd.grad(found.sum(), weights)
    assert not grad[:, 1:].any()


def test_no_token_is_a_batch_too():
    experts = Experts(WIDTH, INTERMEDIATE, NUM_EXPERTS, ExpertMLP(bias=True))
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    output = experts(hidden, torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K))
    output.sum().backward()
    assert output.shape == (0, WIDTH)
    assert all(not weight.grad.any() for weight in experts.parameters())
