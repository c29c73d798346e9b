"""A model whose weights span several blocks, a job for every rule, and what ranks that train it agree on."""

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.optimizers import MakeOptimizer
from meshwright.engine.step.executor import Player
from meshwright.model.analysis.analyze import Reading
from meshwright.parallel.data.batch_split import Batch
from meshwright.parallel.data.zero import Zero
from meshwright.plan.job.job import Optimizer, ParameterGroup
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy import Strategy
from meshwright.run.data.feed import ExampleData, open_feed
from meshwright.testing.ranks import on_threads
from tests.tiny_model import VOCABULARY, player_of, rows, tiny_job

USUAL = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
RULES = {
    "sgd": Optimizer("sgd", momentum=0.9, **USUAL),
    "adamw": Optimizer("adamw", **USUAL),
    "adamw_bf16": Optimizer("adamw_bf16", **USUAL),
    "adamw_8bit": Optimizer("adamw_8bit", **USUAL),
    "lion": Optimizer("lion", **USUAL),
    "lion_bf16": Optimizer("lion_bf16", **USUAL),
    "adafactor": Optimizer("adafactor", **USUAL),
    "muon": Optimizer("muon", momentum=0.95, **USUAL),
    "several": Optimizer(
        "muon",
        momentum=0.95,
        groups=(ParameterGroup("embed.*", 2.0, name="adamw_8bit"), ParameterGroup("layers.1.*", name="adafactor")),
        **USUAL,
    ),
}
SHARD = Batch(axis="dp_shard")
STEPS = 4


class Wide(nn.Module):
    """Weights of several blocks of 256 elements, odd sizes, a matrix of one column, and a scale for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 21)
        self.layers = nn.ModuleList([nn.Linear(21, 47), nn.Linear(47, 30), nn.Linear(30, 1), nn.Linear(1, 30)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(30, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.scale)


def plan_of(reading: Reading, rule: str, ranks: int = 1, stage: int = 3, micro_batch: int = 0, replicas: int = 1) -> Plan:
    strategies: tuple[Strategy, ...] = ()
    if ranks > 1:
        zero = Zero(stage=stage, across="dp_replicate" if replicas > 1 else "")
        strategies = (*((Batch(),) if replicas > 1 else ()), SHARD, zero)
    mesh = Mesh(dp_shard=ranks, dp_replicate=replicas)
    return make_plan(reading, tiny_job(optimizer=RULES[rule]), mesh, strategies, micro_batch)


def trained(player: Player, world: World, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """All parameters, whole, after that many steps more."""
    feed = open_feed(ExampleData(rows()), player.plan, world.rank)
    for step in range(player.steps_done, player.steps_done + steps):
        player.step(feed.batch(step % 2))
    return {name: value.clone() for name, value in player.parameters().items()}


def outcome(reading: Reading, plan: Plan, make: MakeOptimizer | None = None, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """What all ranks of `plan` agree on after so many steps."""
    found = on_threads(lambda world: trained(player_of(reading, plan, world, optimizer=make), world, steps), plan.mesh)
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    return found[0]


def error(mine: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert mine.keys() == wanted.keys()
    return max((mine[name] - value).abs().max().item() for name, value in wanted.items())
