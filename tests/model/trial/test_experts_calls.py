"""Calls of experts are found in a recorded forward by what they are given."""

import torch
from torch import nn

import meshwright as mw
from tests.parallel.expert.mixture_model import TOKENS, analyzed_mixtral
from tests.tiny_model import analyzed_model


def test_every_layer_of_a_transformers_mixture_has_one():
    first, second = analyzed_mixtral().model_spec.experts_calls
    assert (first.block_call, second.block_call) == ("model.layers.0", "model.layers.1")
    assert first.name == "model.layers.0.mlp.experts"
    assert first.params == (f"{first.name}.gate_up_proj", f"{first.name}.down_proj")
    assert (first.num_experts, first.top_k) == (5, 2)
    assert (first.num_tokens, first.hidden_size) == (TOKENS, 16)
    assert first.input_needs_grad
    assert first.weights_need_grad
    assert "model.layers.0.self_attn.o_proj" in first.prior_layers
    assert "model.layers.0.mlp" not in first.prior_layers


def test_a_dense_model_has_none():
    assert analyzed_model().model_spec.experts_calls == ()


class Dense(nn.Module):
    """Every expert computes on every token: no choice is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btd,edf->btf", x, self.weight)


def test_experts_that_take_all_tokens_are_none():
    loss = mw.Loss(
        lambda out, batch: (out.mean((1, 2)) - batch["y"]).square().sum(),
        lambda batch: torch.tensor(len(batch["y"])),
        ("y",),
    )
    analyzed = mw.analyze(Dense, {"x": torch.randn(4, 5, 6), "y": torch.randn(4)}, loss=loss)
    assert analyzed.model_spec.experts_calls == ()
