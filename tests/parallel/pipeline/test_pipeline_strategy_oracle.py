"""torch.distributed.pipelining as a second oracle: the same stages, weights and microbatches give the same
gradients.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import Schedule1F1B

from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool

NUM_SAMPLES, WIDTH, RANKS = 4, 6, 2
THEIRS: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
}
DOUBLE = PrecisionConfig("float64", "float64", "float64")
Gradients = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A residual block of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def samples() -> dict[str, torch.Tensor]:
    return {
        name: torch.linspace(-1, 1, NUM_SAMPLES * WIDTH).add(shift).sin().view(NUM_SAMPLES, WIDTH)
        for name, shift in (("x", 0), ("target", 1))
    }


def squared(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (outputs - target).square().sum()


LOSS = Loss(
    lambda outputs, batch: squared(outputs, batch["target"]),
    lambda batch: torch.tensor(batch["target"].numel()),
    ("target",),
)


@cache
def analyzed() -> AnalyzedModel:
    return analyze(Chain, samples(), loss=LOSS)


def planned(schedule: str) -> Plan:
    job = Job(
        ModelConfig("chain"),
        DataConfig("example"),
        TrainConfig(batch=NUM_SAMPLES, clip=0.0),
        OptimizerConfig("sgd", lr=1.0, weight_decay=0.0),
    )
    job = Job(job.model, job.data, job.train, job.optimizer, precision=DOUBLE)
    return make_plan(analyzed(), job, Mesh(pp=RANKS), (Pipeline(schedule=schedule),), 1)


def ours(world: World, schedule: str) -> tuple[Gradients, Gradients]:
    """The weights before a step of SGD with rate 1, and its gradients: what the step has taken off them."""
    with parallelize(analyzed(), planned(schedule), world=world, loss=LOSS) as engine:
        before = {name: value.clone() for name, value in engine.executor.gather_parameters().items()}
        engine.step({name: value.double() for name, value in samples().items()})
        return before, {
            name: before[name] - value for name, value in engine.executor.gather_parameters().items()
        }


def theirs(world: World, schedule: str, weights: Gradients) -> Gradients:
    """The gradients of this rank's stages."""
    chain = Chain().double()
    chain.load_state_dict(weights)
    at = {"interleaved": [world.rank, world.rank + 2], "zb_v": [world.rank, 3 - world.rank]}.get(schedule)
    number = 4 if at else RANKS
    runs = [chain.layers[each * 4 // number : (each + 1) * 4 // number] for each in at or [world.rank]]
    stages = [
        PipelineStage(nn.Sequential(*run), index, number, torch.device("cpu"))
        for run, index in zip(runs, at or [world.rank], strict=True)
    ]
    batch = {name: value.double() for name, value in samples().items()}
    count = batch["target"].numel()
    made = THEIRS[schedule](
        stages if at else stages[0],
        NUM_SAMPLES,
        loss_fn=lambda outputs, target: squared(outputs, target) / count,
        scale_grads=False,
    )
    last = any(stage.is_last for stage in stages)
    made.step(*([batch["x"]] if world.rank == 0 else []), **({"target": batch["target"]} if last else {}))
    return {name: value.grad for name, value in chain.named_parameters() if value.grad is not None}


def compared(world: World, schedule: str) -> tuple[float, list[str]]:
    """The largest difference of the gradients that this rank has with torch, and what those belong to."""
    weights, mine = ours(world, schedule)
    found = theirs(world, schedule, weights)
    return max((mine[name] - gradient).abs().max().item() for name, gradient in found.items()), sorted(found)


@pytest.mark.parametrize("schedule", THEIRS)
def test_gradients_are_those_of_torch_pipelining(process_pool: ProcessPool, schedule: str):
    found = process_pool.run(compared, Mesh(pp=RANKS), schedule)
    assert max(gap for gap, _ in found) < 1e-13
    assert sorted(name for _, names in found for name in names) == sorted(
        name for name, _ in Chain().named_parameters()
    )
    assert min(len(names) for _, names in found) == 8
