"""Parameters used with sharded features: replicated with summed gradients where possible, else the layers
stay whole.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.tensor_parallel import colwise_rowwise_groups
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh
from tests.model.two_block_model import Net

TOKENS = torch.arange(28).view(4, 7) % 7
BATCH = {"input_ids": TOKENS, "labels": TOKENS.roll(1, -1)}


class Scale(nn.Module):
    """One factor for all features, times another: the parameters meet each other first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.full((1,), 0.3)), nn.Parameter(torch.full((1,), 0.4))
        self.register_buffer("sign", -torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.one * self.other * self.sign)


class Block(nn.Module):
    """Two linear layers, and between them what `between` computes of the block,
    its stream and the features.
    """

    def __init__(self, between: Callable[["Block", torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale, self.gate = Scale(), nn.Parameter(torch.linspace(-1, 1, 8))
        self.heads, self.each = nn.LayerNorm(4), nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self, x, self.up(x)))


def heads(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return block.heads(h.unflatten(-1, (-1, 4))).flatten(-2)


def products(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return block.scale(h).tanh()


def gated(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return h * (x * block.gate).sum(-1, keepdim=True)


def of_the_block(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return h * block.gate.sum()


def used_apart_too(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return block.scale(h) + block.up(block.scale(x))


def one_for_each_head(block: Block, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    parts = h.unflatten(-1, (-1, 4)).split(1, -2)
    return torch.cat([norm(part) for norm, part in zip(block.each, parts, strict=False)], -2).flatten(-2)


def analyzed_model(between: Callable[[Block, torch.Tensor, torch.Tensor], torch.Tensor]) -> AnalyzedModel:
    return analyze(lambda: Net(lambda: Block(between)), BATCH)


def verdict(analyzed: AnalyzedModel, ranks: int) -> object:
    job = Job(ModelConfig("net"), DataConfig("random", sequence=7), TrainConfig(batch=4))
    return verify(analyzed, make_plan(analyzed, job, Mesh(tp=ranks), (TensorParallel(),)), [BATCH])


def role(analyzed: AnalyzedModel, layer: str) -> str:
    return next(weight.role for weight in analyzed.model_spec.params if weight.name == f"layers.0.{layer}")


@pytest.mark.parametrize(
    ("between", "inside"), [(heads, "heads.bias"), (products, "scale.one"), (products, "scale.other")]
)
def test_parameters_between_colwise_and_rowwise_layers_have_gradients_summed_over_ranks(between, inside: str):
    analyzed = analyzed_model(between)
    assert (role(analyzed, "up.weight"), role(analyzed, inside)) == ("colwise", "between_pair")
    for ranks in (2, 3):
        found = verdict(analyzed, ranks)
        assert found.passed, str(found)


@pytest.mark.parametrize("between", [gated, of_the_block, used_apart_too, one_for_each_head])
def test_layers_stay_whole_where_a_parameter_on_their_features_would_get_a_wrong_gradient(between):
    assert role(analyzed_model(between), "up.weight") == role(analyzed_model(between), "down.weight") == ""


def test_an_overlooked_norm_between_colwise_and_rowwise_layers_is_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(colwise_rowwise_groups._GroupSearch, "_num_units_met", lambda *args: {})
    analyzed = analyzed_model(heads)
    assert (role(analyzed, "up.weight"), role(analyzed, "heads.bias")) == ("colwise", "norm")
    assert not verdict(analyzed, 2).passed
