"""Parts that sleep for a fixed time: a pipeline whose every slot takes what it is said to take, on however
few cores.

    forward    each block sleeps
    backward   sleeps where the gradient goes on to what went in (I), and again where it goes to the weight
               (W)

What a rank does besides is microseconds, so the measured bubble is that of the schedule and of its runtime.
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
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from meshwright.plan.job.data_source import DataConfig, ModelConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh

WORDS, WIDTH, TOKENS = 11, 4, 3


@dataclass(frozen=True)
class Slept:
    """What a step took, and the share of it in which ranks waited, on average; that on paper beside it."""

    seconds: float
    bubble: float
    simulated: float


class Asleep(torch.autograd.Function):
    """The tensor itself, whose gradient takes `seconds` to pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """`tensor`."""
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient, after a while."""
        time.sleep(ctx.seconds)
        return gradients[0], None


class Sleeper(nn.Module):
    """A block that takes `seconds` forward, and as long for either half of its backward."""

    def __init__(self, words: int, width: int, seconds: float, *, embeds: bool = False) -> None:
        super().__init__()
        self.weight, self.seconds, self.embeds = (
            nn.Parameter(torch.full((words, width), 0.1)),
            seconds,
            embeds,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` times the weight; of ids, the rows that they name."""
        time.sleep(self.seconds)
        weight = Asleep.apply(self.weight, self.seconds)
        return weight[x] if self.embeds else Asleep.apply(x, self.seconds) @ weight


class Sleepers(nn.Module):
    """As many blocks one behind the other, from ids to logits."""

    def __init__(self, blocks: int, seconds: float) -> None:
        super().__init__()
        self.embed = Sleeper(WORDS, WIDTH, seconds, embeds=True)
        self.layers = nn.ModuleList(Sleeper(WIDTH, WIDTH, seconds) for _ in range(blocks - 2))
        self.head = Sleeper(WIDTH, WORDS, seconds)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, tokens, words)."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def chunks_of(schedule: str) -> int:
    """How many parts a rank has in it here."""
    return SCHEDULES[schedule].num_virtual_stages or 2


def asleep(
    rank: int, size: int, store: str, schedule: str, micros: int, seconds: float
) -> Callable[[], Slept]:
    """The step of a pipeline of such blocks, one in each part, timed from when all ranks begin."""
    join(rank, size, store)
    torch.set_num_threads(1)
    mesh, blocks = Mesh(pp=size), size * chunks_of(schedule)
    rows = torch.zeros(micros, TOKENS, dtype=torch.int64)
    batch = {"input_ids": rows, "labels": rows}
    reading = analyze(lambda: Sleepers(blocks, seconds), batch)
    job = Job(
        ModelConfig("sleepers"),
        DataConfig("zeros", sequence=TOKENS),
        TrainConfig(batch=micros),
        OptimizerConfig("sgd", lr=0.1),
    )
    cuts = (*(f"layers.{number}" for number in range(blocks - 2)), "head")
    pipeline = Pipeline(
        schedule=schedule,
        virtual_stages=0 if SCHEDULES[schedule].num_virtual_stages else chunks_of(schedule),
        split_points=cuts,
    )
    plan = make_plan(reading, job, mesh, (pipeline,), 1)
    on_paper = simulate(pipeline.build_schedule(plan.sharding, micros), _costs(blocks, seconds))
    world = TorchWorld(mesh, rank, "cpu", shared_memory=False)
    engine = parallelize(reading, plan, world=world)

    def step() -> Slept:
        world.group(("pp",)).barrier()
        begin = time.perf_counter()
        engine.step(engine.local_batch(batch))
        seconds = time.perf_counter() - begin
        return Slept(
            seconds, 1 - sum(map(on_paper.busy_time, range(size))) / (size * seconds), on_paper.bubble
        )

    return step


def _costs(parts: int, seconds: float) -> StageCosts:
    """Of one block in each part; ids need no gradient, so the first part does not sleep for one."""
    return StageCosts([seconds] * parts, [0.0, *[seconds] * (parts - 1)], [seconds] * parts)
