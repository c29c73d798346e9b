"""A model whose layers differ in what they save and compute, its batch, job and plans, for memory budgets."""

from functools import cache

import torch
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.job import Job, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.report.timeline.planned_vs_measured_bytes import planned_memory
from tests.tiny_model import VOCABULARY, tiny_job, token_samples

WIDTH, HIDDEN = 32, (128, 16, 256, 64, 16, 192, 32, 128)
SAMPLES = 96
BATCH = token_samples(SAMPLES)
MIB = 2**20


class Mlp(nn.Module):
    """A residual MLP with ReLU."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Unequal(nn.Module):
    """Embedding, MLPs of other sizes each, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(map(Mlp, HIDDEN))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def unequal() -> AnalyzedModel:
    """The analyzed model; cached, because nothing writes into it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(Unequal, {key: value[:2] for key, value in BATCH.items()}, loss=token_cross_entropy())


def float32_job(batch: int = SAMPLES) -> Job:
    """SGD in float32, in which memory is measured by a trial."""
    return tiny_job(batch, precision=PrecisionConfig())


def planned(*strategies: Strategy, mesh: Mesh | None = None, micro_batch: int = 0) -> Plan:
    """The plan of the model with `strategies`."""
    return make_plan(unequal(), float32_job(), mesh or Mesh(), strategies, micro_batch)


def activations(plan: Plan, rank: int = 0) -> int:
    """The most bytes of activations at any time that `plan` states."""
    return planned_memory(plan.for_rank(rank).actions, {})[1]["activations"]


def kinds(plan: Plan, *wanted: str, rank: int = 0) -> list[tuple[str, str]]:
    """The kinds and subjects of the actions of `wanted` kinds for the first microbatch."""
    actions = plan.for_rank(rank).actions
    return [(each.kind, each.subject) for each in actions if each.kind in wanted and each.microbatch == 0]
