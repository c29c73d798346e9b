"""Values cross between stages in the dtype that they have, under autocast too; all ranks of a pipeline scale
the loss alike.
"""

from functools import cache

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize, trace
from meshwright.comm.collectives.group import World
from meshwright.engine.runtime.rank_state import Metrics
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.tensor.declared_pairs import pairs
from tests.tiny_model import TOKENS, VOCABULARY, WIDTH, token_samples

NUM_SAMPLES = 4
MIXED = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")
HALF = PrecisionConfig("float16", "float16", "float16", master="float32")
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


class Chain(nn.Module):
    """Products one behind the other: under autocast each gives out what products compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Toned(Chain):
    """Values that glue makes have the dtype of another stage's output."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(input_ids))
        third = torch.full((WIDTH,), 1 / 3, dtype=x.dtype)
        return self.head(self.layers[2](self.layers[1](x) * third))


@cache
def chain() -> AnalyzedModel:
    return analyze(Chain, token_samples(2))


def planned(analyzed: AnalyzedModel, precision: PrecisionConfig, mesh: Mesh, *strategies: object) -> Plan:
    train, optimizer = TrainConfig(batch=NUM_SAMPLES, clip=0.5, steps=20), OptimizerConfig("adamw", lr=0.01)
    job = Job(
        ModelConfig("chain"), DataConfig("example", sequence=TOKENS), train, optimizer, precision=precision
    )
    return make_plan(analyzed, job, mesh, strategies, 2 if mesh.pp > 1 else 0)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (PrecisionConfig(), "float32"),
        (PrecisionConfig(compute="bfloat16"), "bfloat16"),
        (PrecisionConfig(compute="float16"), "float16"),
        (MIXED, "bfloat16"),
        (HALF, "float16"),
    ],
    ids=["float32", "autocast bfloat16", "autocast float16", "bfloat16", "float16"],
)
def test_values_and_gradients_are_sent_in_the_dtype_that_they_have(precision: PrecisionConfig, dtype: str):
    plan = planned(
        chain(), precision, Mesh(pp=3), Pipeline(schedule="gpipe", split_points=("layers.1", "head"))
    )
    moves = [
        action.transfer
        for role in plan.program.roles
        for action in role.actions
        if action.stream in ("send", "recv")
    ]
    assert {(move.dtype, move.nbytes) for move in moves} == {(dtype, 2 * TOKENS * WIDTH * WIDTHS[dtype])}
    traced = trace(chain(), plan, range(3), fake=False)
    assert traced.passed, str(traced)


def test_a_stream_that_additions_widen_crosses_as_wide_as_it_is():
    plan = planned(
        pairs(layers=3),
        PrecisionConfig(compute="bfloat16"),
        Mesh(pp=2, tp=2),
        Pipeline(scatter=True),
        TensorParallel(),
    )
    assert {action.transfer.dtype for action in plan.for_rank(0).actions if action.kind == "SEND"} == {
        "float32"
    }
    traced = trace(pairs(layers=3), plan, range(4), fake=False)
    assert traced.passed, str(traced)


def trained(analyzed: AnalyzedModel, plan: Plan, steps: int) -> list[Metrics]:
    """Returns what every rank has measured, which is the same on all."""

    def on_rank(world: World) -> list[Metrics]:
        engine = parallelize(analyzed, plan, world=world)
        return [engine.step(engine.local_batch(token_samples(NUM_SAMPLES))) for _ in range(steps)]

    found = run_on_threads(on_rank, plan.mesh)
    assert len(set(map(repr, found))) == 1, "a norm that is not a number equals none"
    return found[0]


@pytest.mark.parametrize(
    "precision", [PrecisionConfig(compute="bfloat16"), MIXED, HALF], ids=["autocast", "bfloat16", "float16"]
)
def test_parts_train_as_one_device_does(precision: PrecisionConfig):
    mine = trained(chain(), planned(chain(), precision, Mesh(pp=3), Pipeline()), 6)
    alone = trained(chain(), planned(chain(), precision, Mesh()), 6)
    assert [each.loss for each in mine] == pytest.approx([each.loss for each in alone], rel=2e-2)
    assert mine[-1].loss < mine[0].loss


def test_under_autocast_each_part_knows_the_dtype_of_what_others_give_out():
    analyzed = analyze(Toned, token_samples(2))
    mixed = PrecisionConfig(compute="bfloat16")
    parts = planned(analyzed, mixed, Mesh(pp=2), Pipeline(split_points=("layers.1",)))
    alone = make_plan(analyzed, parts.job, Mesh(), (), 2)
    assert trained(analyzed, parts, 1)[0].loss == pytest.approx(trained(analyzed, alone, 1)[0].loss, rel=1e-7)


def test_an_overflow_in_one_part_leaves_out_the_step_of_all():
    scaled = PrecisionConfig("float16", "float16", "float16", master="float32", loss_scale=2.0**30)
    found = trained(chain(), planned(chain(), scaled, Mesh(pp=2), Pipeline()), 20)
    left_out = [each.overflow for each in found].count(True)
    assert 5 < left_out < 20
    assert [each.overflow for each in found] == [True] * left_out + [False] * (20 - left_out)
    assert found[-1].loss_scale == 2.0 ** (30 - left_out)
