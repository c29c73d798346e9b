"""Optimizer states in checkpoints: elementwise, per block and per matrix; a run continues on another number
of ranks.
"""

from pathlib import Path

import pytest
import torch

from meshwright.api import analyze, make_plan
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.make_optimizers import OptimizerFactory
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.parallel.data.optimizer_cases import RULES, SHARD, STEPS, Wide, error, outcome, plan_of, trained
from tests.tiny_model import executor_of, tiny_job, token_samples


@pytest.fixture(scope="module")
def analyzed() -> AnalyzedModel:
    return analyze(Wide, token_samples(2))


@pytest.mark.parametrize("rule", RULES)
def test_what_three_ranks_saved_two_go_on_with(analyzed: AnalyzedModel, rule: str, tmp_path: Path):
    three, two = plan_of(analyzed, rule, 3, stage=3), plan_of(analyzed, rule, 2, stage=2)

    def first(world: World) -> Path:
        executor = executor_of(analyzed, three, world)
        trained(executor, world, 2)
        return save_tensors(tmp_path / "three", 2, executor.state_dict(), {}, world.group(AXES), 1)

    def then(world: World) -> tuple[Path, dict[str, torch.Tensor]]:
        executor = executor_of(analyzed, two, world)
        executor.load_state_dict(load_tensors(saved)[0], 2)
        again = save_tensors(tmp_path / "two", 2, executor.state_dict(), {}, world.group(AXES), 1)
        return again, trained(executor, world, STEPS - 2)

    def one(world: World) -> Path:
        executor = executor_of(analyzed, plan_of(analyzed, rule), world)
        executor.load_state_dict(load_tensors(saved)[0], 2)
        return save_tensors(tmp_path / "one", 2, executor.state_dict(), {}, world.group(AXES), 1)

    saved = run_on_threads(first, three.mesh)[0]
    again, parameters = run_on_threads(then, two.mesh)[0]
    assert compare_checkpoints(saved, again) == []
    assert compare_checkpoints(saved, run_on_threads(one, Mesh())[0]) == []
    uninterrupted = outcome(analyzed, plan_of(analyzed, rule, 2, stage=2))
    assert error(parameters, uninterrupted) < 1e-10


@pytest.mark.parametrize(
    "kind", [torch.optim.Rprop, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad]
)
def test_torchs_elementwise_optimizers_continue_on_other_ranks(
    analyzed: AnalyzedModel, kind: OptimizerFactory, tmp_path: Path
):
    three, two = plan_of(analyzed, "adamw", 3), plan_of(analyzed, "adamw", 2, stage=1)

    def first(world: World) -> Path:
        executor = executor_of(analyzed, three, world, optimizer=kind)
        trained(executor, world, 2)
        return save_tensors(tmp_path, 2, executor.state_dict(), {}, world.group(AXES), 1)

    def then(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(analyzed, two, world, optimizer=kind)
        executor.load_state_dict(load_tensors(saved)[0], 2)
        return trained(executor, world, STEPS - 2)

    saved = run_on_threads(first, three.mesh)[0]
    assert (
        error(run_on_threads(then, two.mesh)[0], outcome(analyzed, plan_of(analyzed, "adamw"), kind)) < 1e-10
    )


class Sums(torch.optim.SGD):
    """Keeps two numbers per piece, which no other number of ranks could take up."""

    shard_alignment = "element"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sums"] = torch.stack(
                    [parameter.grad.sum(), parameter.grad.square().sum()]
                )


def test_state_of_a_shard_that_is_not_elementwise_is_refused(analyzed: AnalyzedModel):
    def saved(world: World) -> None:
        executor = executor_of(analyzed, plan_of(analyzed, "sgd", 3), world, optimizer=Sums)
        trained(executor, world, 1)
        executor.state_dict()

    with pytest.raises(
        PlanError, match=r"keeps 'sums/.*' of shape \[2\] for elements .* of a weight(?s:.*)one per element"
    ):
        run_on_threads(saved, Mesh(dp_shard=3))


@pytest.mark.parametrize("rule", ["lion_bf16", "adamw_bf16", "adamw_8bit", "lion"])
def test_optimizer_states_keep_their_dtype_when_weights_get_master_weights(
    analyzed: AnalyzedModel, rule: str, tmp_path: Path
):
    halves = PrecisionConfig("bfloat16", "bfloat16", "bfloat16")
    mastered = PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32")

    def play(world: World, precision: PrecisionConfig, path: Path | None) -> tuple[Path, set[torch.dtype]]:
        job = tiny_job(optimizer=RULES[rule], precision=precision)
        executor = executor_of(analyzed, make_plan(analyzed, job, Mesh(dp_shard=2), (SHARD, ZeRO())), world)
        if path is not None:
            executor.load_state_dict(load_tensors(path)[0], 2)
        trained(executor, world, 2)
        states = [
            value
            for each in executor.state.optimizers
            for held in each.state.values()
            for value in held.values()
        ]
        dtypes = {value.dtype for value in states if isinstance(value, torch.Tensor)}
        return save_tensors(
            tmp_path, executor.steps_done, executor.state_dict(), {}, world.group(AXES), 1
        ), dtypes

    path, before = run_on_threads(lambda world: play(world, halves, None), Mesh(dp_shard=2))[0]
    _, after = run_on_threads(lambda world: play(world, mastered, path), Mesh(dp_shard=2))[0]
    assert before == {"adamw_8bit": {torch.uint8, torch.float32}}.get(rule, {torch.bfloat16})
    assert after == ({torch.float32} if rule == "lion" else before)
