"""With `align_bytes`, each parameter and each shard begins at a multiple of it in every buffer, and nothing
else changes: odd sizes (a bias of 10, a vocabulary of 257) on every layout of data parallelism.
"""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks.tensor_parallel.tensor_families import analyzed_model as transformers_model
from meshwright.api import analyze, make_plan, trace
from meshwright.comm.collectives.group import World
from meshwright.engine.step.executor import StepExecutor
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.planner.program_cost.rank_memory import state_bytes
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import executor_of

VOCABULARY, WIDTH, INNER, TOKENS = 257, 6, 10, 12
MIXED = PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")
SHARDS = BatchSplit("dp_shard")
LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "ddp": (Mesh(dp_replicate=3), (BatchSplit(), DDP(bucket_mb=0.005))),
    **{f"zero {stage}": (Mesh(dp_shard=3), (SHARDS, ZeRO(stage=stage))) for stage in (1, 2, 3)},
    "hsdp": (
        Mesh(dp_replicate=2, dp_shard=3),
        (BatchSplit(), SHARDS, ZeRO(replicate_axis="dp_replicate")),
    ),
    "zero 2, adamw_8bit": (Mesh(dp_shard=3), (SHARDS, ZeRO(stage=2))),
    "zero 3, adafactor": (Mesh(dp_shard=3), (SHARDS, ZeRO())),
    "tp, zero 3": (Mesh(dp_shard=2, tp=2), (SHARDS, TensorParallel(), ZeRO())),
    "tp, zero 1, muon": (Mesh(dp_shard=2, tp=2), (SHARDS, TensorParallel(), ZeRO(stage=1))),
    "tied pipeline, ddp": (Mesh(pp=2, dp_replicate=2), (BatchSplit(), DDP(), Pipeline())),
    "tied pipeline, zero 2": (Mesh(pp=2, dp_shard=2), (SHARDS, ZeRO(stage=2), Pipeline())),
}
OPTIMIZERS = "adamw_8bit", "adafactor", "muon"


class Odd(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        pairs = ((nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def samples(vocabulary: int, count: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (count, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


@cache
def odd_model(*, tied: bool) -> AnalyzedModel:
    return analyze(lambda: Odd(tied=tied), samples(VOCABULARY, 2))


def model_and_plan(layout: str, align_bytes: int, precision: PrecisionConfig) -> tuple[AnalyzedModel, Plan]:
    mesh, strategies = LAYOUTS[layout]
    is_tied, optimizer = "tied" in layout, next((each for each in OPTIMIZERS if each in layout), "adamw")
    analyzed = odd_model(tied=is_tied) if mesh.tp == 1 else transformers_model("llama", even=False)
    stepped_by = OptimizerConfig(optimizer, momentum=0.9 if optimizer == "muon" else 0.0)
    job = Job(train=TrainConfig(batch=12, clip=0.0), precision=precision, optimizer=stepped_by)
    return analyzed, make_plan(analyzed, job, mesh, strategies, 1, align_bytes=align_bytes)


def trained(analyzed: AnalyzedModel, plan: Plan, found: type["Found"]) -> list["Found"]:
    vocabulary = 61 if plan.mesh.tp > 1 else VOCABULARY

    def on_rank(world: World) -> Found:
        executor = executor_of(analyzed, plan, world)
        batch = {key: value[plan.samples_read(world.rank)] for key, value in samples(vocabulary).items()}
        norms = [float(executor.step(batch).grad_norm) for _ in range(2)]
        store, names = executor.state.flat_params, executor.state.trained_module.parameters
        values = {name: store.full_value(name, "TEST").clone() for name in names}
        result = found(executor, norms, values)
        executor.close()
        return result

    return run_on_threads(on_rank, plan.mesh)


class Found:
    """What a rank holds after two steps."""

    def __init__(self, executor: StepExecutor, norms: list[float], values: dict[str, torch.Tensor]) -> None:
        self.norms, self.values, self.memory = norms, values, executor.memory_by_category()
        self.planned = state_bytes(executor.state.plan, executor.state.plan.rank).as_dict()
        self.begins = {what: each.storage_offset() * each.itemsize for what, each in places(executor)}


def places(executor: StepExecutor) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that lies in a buffer of several."""
    for name, bucket in executor.state.buckets.items():
        yield from ((f"bucket {name}: {each}", view) for each, view in bucket.views.items())
    for held in executor.state.flat_params.by_param_group.values():
        group = held.spec.name
        yield from ((f"parameter {name}", view) for name, view in held.views.items())
        yield from ((f"stepped {name}", each.data) for name, each in held.optimizer_params.items())
        yield f"shard {group}", held.shard
        yield f"shard in full {group}", held.full_tensor[held.shard_slice]
        if held.gradient is not None:
            yield f"gradient {group}", held.gradient
        gradients = ((name, held.param_gradient(name)) for name in held.optimizer_params)
        yield from ((f"gradient {name}", each) for name, each in gradients if each is not None)


@pytest.mark.parametrize("precision", [PrecisionConfig(), MIXED], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_parameter_and_shard_begins_at_a_multiple(layout: str, precision: PrecisionConfig):
    aligned, packed = (
        trained(*model_and_plan(layout, align_bytes, precision), Found) for align_bytes in (128, 1)
    )
    for rank in aligned:
        assert {what: begin for what, begin in rank.begins.items() if begin % 128} == {}
    assert sum(len(rank.begins) for rank in aligned) >= 20
    if "8bit" not in layout:  # its blocks begin at multiples anyway
        assert any(begin % 128 for rank in packed for begin in rank.begins.values())
    for mine, theirs in zip(aligned, packed, strict=True):
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)
        for name, value in mine.values.items():
            # an offset decides the last bit of a product
            torch.testing.assert_close(value, theirs.values[name], rtol=1e-5, atol=1e-7, msg=name)
        owned = "muon" in layout  # full gradients of owners are gone after the step
        assert owned or sum(mine.memory.values()) == sum(mine.planned.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_send_what_the_plan_says(layout: str):
    analyzed, plan = model_and_plan(layout, 128, MIXED)
    assert trace(analyzed, plan, fake=False).passed
    assert plan.hash != model_and_plan(layout, 1, MIXED)[1].hash
