"""Models with tables, and plans whose tables lie on hosts."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import nn

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.make_optimizers import OptimizerMaker
from meshwright.engine.runtime.build_module import make_stateless_rng, make_trained_module
from meshwright.engine.runtime.rank_state import RankState
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.plan.plan import Plan
from meshwright.plan.strategy_interface import Strategy
from tests.tiny_model import tiny_job

USERS, ITEMS, WIDTH, HISTORY = 11, 7, 4, 3
NUM_SAMPLES = 24
LOSS = mw.Loss(
    total=lambda outputs, batch: (outputs - batch["rating"]).square().sum(),
    count=lambda batch: torch.tensor(float(len(batch["rating"]))),
    targets=("rating",),
)


class Tables(nn.Module):
    """A user, and the mean of the items of a history; the item `padding` has no gradient."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH, padding_idx=padding)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.user(user), self.item(items).mean(1)], dim=-1)


class Recommender(nn.Module):
    """Tables, and a multi-layer perceptron that predicts a rating."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.tables = Tables(padding)
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 1)

    def forward(self, user: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        x = self.tables(user, items)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).squeeze(-1)


@cache
def ratings(count: int = NUM_SAMPLES) -> dict[str, torch.Tensor]:
    """Samples of which some users come often, and some never."""
    generator = torch.Generator().manual_seed(2)
    return {
        "user": torch.randint(USERS, (count,), generator=generator).clamp(max=USERS - 3),
        "items": torch.randint(ITEMS, (count, HISTORY), generator=generator),
        "rating": torch.randn(count, dtype=torch.float64, generator=generator),
    }


@cache
def recommender(padding: int | None = None) -> AnalyzedModel:
    """The analyzed model; cached, because nothing writes into it."""
    return mw.analyze(
        lambda: Recommender(padding), {key: value[:2] for key, value in ratings().items()}, loss=LOSS
    )


def host_plan(
    hosts: int = 1,
    workers: int = 2,
    micro_batch: int = 1,
    analyzed: AnalyzedModel | None = None,
    tables: Sequence[str] = (),
    beside: Sequence[Strategy] = (),
    **job: object,
) -> Plan:
    """The plan of so many workers and hosts."""
    strategies = (mw.BatchSplit(), mw.EmbeddingHost(hosts=hosts, tables=tuple(tables)), mw.DDP(), *beside)
    mesh = mw.Mesh(dp_replicate=workers + hosts)
    return mw.make_plan(analyzed or recommender(), tiny_job(**job), mesh, strategies, micro_batch)


def executor_on(
    plan: Plan, world: World, optimizer: OptimizerMaker | None = None, analyzed: AnalyzedModel | None = None
) -> StepExecutor:
    """One rank of a plan of the recommender, or of another model of its batches."""
    analyzed = analyzed or recommender()
    trained_module = make_trained_module(analyzed, world.device, torch.float64)
    state = RankState(trained_module, world, LOSS)
    return StepExecutor(plan.for_rank(world.rank), state, optimizer, make_stateless_rng(analyzed, plan))


def samples_of(plan: Plan, rank: int, step: int) -> dict[str, torch.Tensor]:
    """The samples of a rank in a step: others in every step."""
    rows = [(row + 5 * step) % NUM_SAMPLES for row in plan.samples_read(rank)]
    return {key: value[rows] for key, value in ratings().items()}
