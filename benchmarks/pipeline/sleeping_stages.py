"""Stages that sleep for a fixed time: a pipeline whose actions take a given time, on any number of cores.

    forward    each block sleeps
    backward   sleeps once before the gradient of the input is returned (I), and once before that of the
               weight (W)

All other work of a rank takes microseconds, so the measured bubble is that of the schedule and of the engine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.models.llama_steps import join
from meshwright.api import analyze, make_plan, parallelize
from meshwright.comm.world import TorchWorld
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.sharding.mesh import Mesh

VOCAB_SIZE, WIDTH, TOKENS = 11, 4, 3


@dataclass(frozen=True)
class SleepStep:
    """Seconds of a step, the average share of it in which ranks waited, and that share in the simulation."""

    seconds: float
    bubble: float
    simulated: float


class SleepInBackward(torch.autograd.Function):
    """The identity, whose backward takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """Returns a view of `tensor`."""
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient after `seconds`."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingBlock(nn.Module):
    """A block that takes `seconds` forward, and as long for each half (I, W) of its backward."""

    def __init__(self, num_rows: int, width: int, seconds: float, *, embeds: bool = False) -> None:
        super().__init__()
        self.weight, self.seconds, self.embeds = (
            nn.Parameter(torch.full((num_rows, width), 0.1)),
            seconds,
            embeds,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` times the weight; if it embeds, the rows of the weight at the ids `x`."""
        time.sleep(self.seconds)
        weight = SleepInBackward.apply(self.weight, self.seconds)
        return weight[x] if self.embeds else SleepInBackward.apply(x, self.seconds) @ weight


class SleepingModel(nn.Module):
    """A chain of `blocks` sleeping blocks, from ids to logits."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.embed = SleepingBlock(VOCAB_SIZE, WIDTH, seconds, embeds=True)
        self.layers = nn.ModuleList(SleepingBlock(WIDTH, WIDTH, seconds) for _ in range(blocks - 2))
        self.head = SleepingBlock(WIDTH, VOCAB_SIZE, seconds)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns logits (samples, tokens, vocabulary)."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def virtual_stages_of(schedule: str) -> int:
    """Returns the number of virtual stages per rank in this benchmark."""
    return SCHEDULES[schedule].num_virtual_stages or 2


def sleeping_pipeline(
    rank: int, size: int, store: str, schedule: str, num_microbatches: int, seconds: float
) -> Callable[[], SleepStep]:
    """Returns the step of a pipeline of sleeping blocks, one per stage; it is timed from a barrier of all
    ranks.
    """
    join(rank, size, store)
    torch.set_num_threads(1)
    mesh, blocks = Mesh(pp=size), size * virtual_stages_of(schedule)
    ids = torch.zeros(num_microbatches, TOKENS, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    analyzed = analyze(lambda: SleepingModel(blocks, seconds), batch)
    job = Job(
        ModelConfig("sleepers"),
        DataConfig("zeros", sequence=TOKENS),
        TrainConfig(batch=num_microbatches),
        OptimizerConfig("sgd", lr=0.1),
    )
    split_points = (*(f"layers.{number}" for number in range(blocks - 2)), "head")
    pipeline = Pipeline(
        schedule=schedule,
        virtual_stages=0 if SCHEDULES[schedule].num_virtual_stages else virtual_stages_of(schedule),
        split_points=split_points,
    )
    plan = make_plan(analyzed, job, mesh, (pipeline,), 1)
    simulation = simulate(pipeline.build_schedule(plan.sharding, num_microbatches), _costs(blocks, seconds))
    world = TorchWorld(mesh, rank, "cpu", shared_memory=False)
    engine = parallelize(analyzed, plan, world=world)

    def step() -> SleepStep:
        world.group(("pp",)).barrier()
        begin = time.perf_counter()
        engine.step(engine.local_batch(batch))
        seconds = time.perf_counter() - begin
        return SleepStep(
            seconds, 1 - sum(map(simulation.busy_time, range(size))) / (size * seconds), simulation.bubble
        )

    return step


def _costs(num_stages: int, seconds: float) -> StageCosts:
    """Costs of one block per stage; ids need no gradient, so the first stage does not sleep in I."""
    return StageCosts([seconds] * num_stages, [0.0, *[seconds] * (num_stages - 1)], [seconds] * num_stages)
