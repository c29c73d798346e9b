"""Planted scale errors: the most common bug of data parallelism, and one that Adam hides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.job import OptimizerConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import (
    analyzed_model,
    case_of,
    edited,
    executor_of,
    first_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

LAYERS = (BatchSplit(), DDP(bucket_mb=300 / 2**20))


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyzed_model()


@pytest.fixture(scope="module")
def plan(analyzed: AnalyzedModel) -> Plan:
    return plan_of(analyzed, 3, LAYERS, micro_batch=2)


def local_count(actions: list[Action]) -> list[Action]:
    return [replace(a, transfer=None, stream="compute") if a.kind == "TOKEN_COUNT" else a for a in actions]


def test_a_loss_over_the_local_count_where_counts_are_equal(analyzed: AnalyzedModel, plan: Plan):
    verdict = verdict_of(case_of(analyzed, edited(plan, local_count), token_samples(uneven=False)))
    assert first_of(verdict)[:2] == (0, "gradient")
    assert verdict.first_difference.factor == pytest.approx(3.0)
    assert verdict.cause == "loss scale"


def test_a_loss_over_the_local_count_where_counts_differ(analyzed: AnalyzedModel, plan: Plan):
    """The mean of means: every rank's summand has a scale of its own, and no factor repairs that."""
    verdict = verdict_of(case_of(analyzed, edited(plan, local_count)))
    assert first_of(verdict)[:2] == (0, "gradient")
    assert verdict.first_difference.factor is None
    assert verdict.cause == "technique"


def test_a_tally_that_stays_local(analyzed: AnalyzedModel, plan: Plan):
    def local(actions: list[Action]) -> list[Action]:
        return [replace(a, transfer=None, stream="compute") if a.kind == "LOSS_SUM" else a for a in actions]

    verdict = verdict_of(case_of(analyzed, edited(plan, local)))
    assert first_of(verdict) == (0, "loss", "", "")
    assert verdict.cause == "technique"


@dataclass(frozen=True)
class Averaging(DDP):
    """DDP as torch has it: the mean over ranks instead of the sum."""

    def bind(self, runtime: Any) -> dict[str, Callable[[Action], None]]:
        def reduce(action: Action) -> None:
            runtime.state.operand(action).output.div_(runtime.state.world.mesh.world_size)
            runtime.state.start_collective(action)

        return {"REDUCE": reduce}


def test_gradients_that_are_averaged_instead_of_summed(analyzed: AnalyzedModel, plan: Plan):
    faulty = replace(plan, strategies=(BatchSplit(), Averaging(bucket_mb=300 / 2**20)))
    verdict = verdict_of(case_of(analyzed, faulty))
    assert first_of(verdict) == (0, "gradient", "head.bias", "head")
    assert verdict.first_difference.factor == pytest.approx(1 / 3)
    assert verdict.cause == "loss scale"


def test_a_loss_that_is_scaled_by_the_number_of_micro_batches(analyzed: AnalyzedModel, plan: Plan):
    exact = token_cross_entropy()
    case = case_of(analyzed, plan)
    scaled = replace(case, loss=Loss(lambda outputs, batch: exact.total(outputs, batch) / 2, exact.count))
    verdict = verdict_of(case, on_rank=lambda case, world: scaled)
    assert first_of(verdict)[:2] == (0, "gradient")
    assert verdict.first_difference.factor == pytest.approx(0.5)
    assert verdict.cause == "loss scale"


def test_adam_would_have_hidden_the_scale(analyzed: AnalyzedModel, plan: Plan):
    """Why parity uses SGD: under Adam, gradients three times too small train to the same parameters."""
    job = tiny_job(
        optimizer=OptimizerConfig("adamw", lr=0.01, eps=0.0), train=replace(plan.job.train, clip=0.0)
    )
    after = []
    for strategies in (LAYERS, (BatchSplit(), Averaging(bucket_mb=300 / 2**20))):
        adam = plan_of(analyzed, 3, strategies, 2, job)
        read_batch = case_of(analyzed, adam).batch_reader

        def body(world: World, adam: Plan = adam, read_batch: Any = read_batch) -> torch.Tensor:
            executor = executor_of(analyzed, adam, world)
            executor.step(read_batch(adam, world.rank)(0))
            return executor.state.trained_module.parameters["head.weight"].detach()

        after.append(run_on_threads(body, Mesh(dp_replicate=3))[0])
    torch.testing.assert_close(after[0], after[1], rtol=1e-12, atol=1e-12)


CONFIG = """
micro_batch = 2
[model]
source = "{source}"
[data]
source = "example"
[train]
steps = 4
batch = 12
[mesh]
dp_replicate = 3
[run]
folder = "{folder}"
"""
FACTORY = """
from meshwright.model.loading.loader import Model
from tests.tiny_model import Tiny, token_samples

def build():
    return Model(Tiny(), example=token_samples())
"""


def test_the_command_ends_with_code_one_and_a_verdict_that_failed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tiny_model.py").write_text(FACTORY)
    config = tmp_path / "plan.toml"
    config.write_text(CONFIG.format(source=tmp_path / "tiny_model.py:build", folder=tmp_path / "run"))
    good = CliRunner().invoke(app, ["verify", str(config)])
    assert good.exit_code == 0, good.output
    monkeypatch.setattr(DDP, "bind", Averaging.bind)
    bad = CliRunner().invoke(app, ["verify", str(config), "--json", str(tmp_path / "bad.json")])
    assert bad.exit_code == 1, bad.output
    assert "dp_replicate 3 does NOT equal one device (allowed 1e-10; cause: loss scale)" in bad.output
    assert '"passed": false' in (tmp_path / "bad.json").read_text()
