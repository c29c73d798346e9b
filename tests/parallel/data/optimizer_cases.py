"""A model whose weights span several blocks, a job per optimizer, and the result of training on several
ranks.
"""

from collections.abc import Mapping

import torch
from torch import nn

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.make_optimizers import OptimizerFactory
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import VOCABULARY, executor_of, tiny_job, token_samples

USUAL = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
RULES = {
    "sgd": OptimizerConfig("sgd", momentum=0.9, **USUAL),
    "adamw": OptimizerConfig("adamw", **USUAL),
    "adamw_bf16": OptimizerConfig("adamw_bf16", **USUAL),
    "adamw_8bit": OptimizerConfig("adamw_8bit", **USUAL),
    "lion": OptimizerConfig("lion", **USUAL),
    "lion_bf16": OptimizerConfig("lion_bf16", **USUAL),
    "adafactor": OptimizerConfig("adafactor", **USUAL),
    "muon": OptimizerConfig("muon", momentum=0.95, **USUAL),
    "several": OptimizerConfig(
        "muon",
        momentum=0.95,
        groups=(
            ParamGroupConfig("embed.*", 2.0, name="adamw_8bit"),
            ParamGroupConfig("layers.1.*", name="adafactor"),
        ),
        **USUAL,
    ),
}
SHARD = BatchSplit(axis="dp_shard")
STEPS = 4


class Wide(nn.Module):
    """Weights of several blocks of 256 elements, odd sizes, a matrix of one column,
    and a scale for the root.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 21)
        self.layers = nn.ModuleList(
            [nn.Linear(21, 47), nn.Linear(47, 30), nn.Linear(30, 1), nn.Linear(1, 30)]
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(30, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x * self.scale)


def plan_of(
    analyzed: AnalyzedModel,
    rule: str,
    ranks: int = 1,
    stage: int = 3,
    micro_batch: int = 0,
    replicas: int = 1,
) -> Plan:
    strategies: tuple[Strategy, ...] = ()
    if ranks > 1:
        zero = ZeRO(stage=stage, replicate_axis="dp_replicate" if replicas > 1 else "")
        strategies = (*((BatchSplit(),) if replicas > 1 else ()), SHARD, zero)
    mesh = Mesh(dp_shard=ranks, dp_replicate=replicas)
    return make_plan(analyzed, tiny_job(optimizer=RULES[rule]), mesh, strategies, micro_batch)


def trained(executor: StepExecutor, world: World, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """All parameters, whole, after that many steps more."""
    local_batches = open_local_batches(ExampleDataset(token_samples()), executor.state.plan, world.rank)
    for step in range(executor.steps_done, executor.steps_done + steps):
        executor.step(local_batches.batch(step % 2))
    return {name: value.clone() for name, value in executor.gather_parameters().items()}


def outcome(
    analyzed: AnalyzedModel, plan: Plan, make: OptimizerFactory | None = None, steps: int = STEPS
) -> dict[str, torch.Tensor]:
    """Returns what all ranks of `plan` agree on after so many steps."""
    found = run_on_threads(
        lambda world: trained(executor_of(analyzed, plan, world, optimizer=make), world, steps), plan.mesh
    )
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    return found[0]


def error(mine: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    assert mine.keys() == expected.keys()
    return max((mine[name] - value).abs().max().item() for name, value in expected.items())
