"""Calls of experts are found in a recorded forward by what they are given."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.plan.model_spec.model_spec import ExpertsCall
from tests.parallel.expert.mixture_model import TOKENS, analyzed_deepseek, analyzed_mixtral
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


class ReadBefore(mw.nn.MixtureOfExperts):
    """A layer that reads what its experts return before it calls the shared one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        routes = self.routing.route(hidden, self.router)
        output = 2 * self.expert_rows(self.experts, hidden.flatten(0, 1), routes).view(hidden.shape)
        return output + self.shared(hidden)


@pytest.mark.parametrize(
    ("layer", "shared"),
    [(mw.nn.MixtureOfExperts, "1.shared"), (ReadBefore, "")],
    ids=["apart", "read before"],
)
def test_shared_experts_are_those_called_before_an_operation_on_the_result(layer: Any, shared: str):
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), layer(6, 5, 4, shared_intermediate=3))

    batch = {"input": torch.randn(4, 3, 6), "y": torch.randn(4)}
    loss = mw.Loss(
        lambda out, batch: (out.mean((1, 2)) - batch["y"]).square().sum(),
        lambda batch: torch.tensor(len(batch["y"])),
        ("y",),
    )
    (call,) = mw.analyze(model, batch, loss=loss).model_spec.experts_calls
    assert call.shared_experts == shared


def test_shared_experts_of_transformers_are_found():
    (call,) = analyzed_deepseek().model_spec.experts_calls
    assert call.shared_experts == "model.layers.1.mlp.shared_experts"
    assert {each.shared_experts for each in analyzed_mixtral().model_spec.experts_calls} == {""}


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


class Gated(nn.Module):
    """Experts that are called on every token each, as those of Llama 4; `change` breaks them."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        self.up = nn.Parameter(torch.ones(4, 6, 10))
        self.down = nn.Parameter(torch.ones(4, 5, 6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(-1, 4, 6).transpose(0, 1) if self.change == "order" else rows.view(4, -1, 6)
        gate, up = torch.bmm(rows, self.up).chunk(2, -1)
        hidden = torch.nn.functional.silu(gate)
        hidden = hidden if self.change == "gate" else hidden * up
        hidden = hidden + 1 if self.change == "bias" else hidden
        hidden = hidden - hidden.mean(1, keepdim=True) if self.change == "mean" else hidden
        return torch.bmm(hidden, self.down).view(-1, 6)


class Scored(nn.Module):
    """Gives each expert all tokens, times a score that is 0 where it is not among the 2 best."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4), Gated(change)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        best, index = self.router(tokens).topk(2)
        scores = tokens.new_zeros(len(tokens), 4).scatter(1, index, best.sigmoid())
        rows = self.experts(tokens.repeat(4, 1) * scores.t().reshape(-1, 1))
        return rows.view(4, *x.shape).sum(0)


class Layers(nn.Module):
    """Two layers, so that the blocks are known."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scored(change) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def scored_calls(change: str = "") -> tuple[ExpertsCall, ...]:
    loss = mw.Loss(
        lambda out, batch: (out.mean((1, 2)) - batch["y"]).square().sum(),
        lambda batch: torch.tensor(len(batch["y"])),
        ("y",),
    )
    batch = {"x": torch.randn(4, 5, 6), "y": torch.randn(4)}
    return mw.analyze(partial(Layers, change), batch, loss=loss).model_spec.experts_calls


def test_experts_with_a_score_of_every_token_are_found():
    call, _ = scored_calls()
    assert (call.form, call.num_experts, call.top_k, call.num_tokens) == ("dense", 4, 2, 5)
    assert (call.routed.num_tokens, call.routed.top_k) == (10, 1)


@pytest.mark.parametrize("change", ["order", "gate", "bias", "mean"])
def test_experts_of_which_rows_of_zeros_are_not_known_to_be_needless_are_none(change: str):
    assert scored_calls(change) == ()
