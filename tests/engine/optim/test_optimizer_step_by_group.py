"""STEP of one parameter group after the other changes no bit, and keeps checks, memory and prices whole."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from meshwright.api import trace
from meshwright.comm.collectives.group import World
from meshwright.engine.optim.sharded_state_dict import TensorShard
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.rank_view import RankView
from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.single_device_program import step_by_group
from meshwright.plan.strategy_interface import Strategy, StrategyPhase
from meshwright.planner.program_cost.rank_memory import peak_nbytes
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.engine.one_device import bits
from tests.tiny_model import (
    NUM_SAMPLES,
    analyzed_model,
    case_of,
    edited,
    executor_of,
    plan_of,
    tiny_job,
    token_samples,
    verdict_of,
)

ANALYZED = analyzed_model()
BATCH = token_samples(NUM_SAMPLES)


@dataclass(frozen=True)
class StepsByGroup(Strategy):
    """Steps one parameter group after the other."""

    name: ClassVar[str] = "steps_by_group"
    phase: ClassVar[StrategyPhase] = "comm"

    def rewrite(self, program: Program, view: RankView, job: Job) -> Program:
        return program.edit(lambda actions: step_by_group(actions, view))


STORES = {
    "ddp": (BatchSplit(), DDP(bucket_mb=300 / 2**20)),
    **{f"zero {stage}": (BatchSplit(), ZeRO(axis="dp_replicate", stage=stage)) for stage in (1, 2, 3)},
}
PRECISIONS = {
    "float64": PrecisionConfig("float64", "float64", "float64"),
    "masters": PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
    "summed in bfloat16": PrecisionConfig("float32", "float32", "bfloat16"),
}


def trained(plan: Plan) -> list[dict[str, torch.Tensor]]:
    """Parameters and states of each rank after three steps."""

    def body(world: World) -> dict[str, torch.Tensor]:
        executor = executor_of(ANALYZED, plan, world)
        rows = torch.tensor(plan.samples_read(world.rank))
        for _ in range(3):
            executor.step({key: value[rows] for key, value in BATCH.items()})
        saved = executor.state_dict().items()
        local = {name: value.values if isinstance(value, TensorShard) else value for name, value in saved}
        found = bits({**executor.gather_parameters(use_masters=True), **local})
        executor.close()
        return found

    return run_on_threads(body, plan.mesh)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("store", STORES)
def test_it_changes_no_bit(store: str, precision: str):
    optimizer = OptimizerConfig("adamw", lr=0.01)
    job = replace(tiny_job(), precision=PRECISIONS[precision], optimizer=optimizer)
    plain = plan_of(ANALYZED, 2, STORES[store], job=job)
    split = plan_of(ANALYZED, 2, (*STORES[store], StepsByGroup()), job=job)
    steps = [action for action in split.program.roles[0].actions if action.kind == "STEP"]
    assert len(steps) == len(split.for_rank(0).view.param_groups) > 1
    assert static_checks(split) == []
    assert trained(split) == trained(plain)
    assert peak_nbytes(split, 0) == peak_nbytes(plain, 0)


def test_a_trace_and_a_comparison_with_one_device_pass():
    plan = plan_of(ANALYZED, 3, (*STORES["zero 3"], StepsByGroup()))
    assert trace(ANALYZED, plan).passed
    verdict = verdict_of(case_of(ANALYZED, plan))
    assert verdict.passed, str(verdict)


def without_last_step(actions: list[Action]) -> list[Action]:
    last = [action for action in actions if action.kind == "STEP"][-1]
    return [action for action in actions if action is not last]


def without_waits(actions: list[Action]) -> list[Action]:
    return [replace(action, waits=()) if action.kind == "STEP" else action for action in actions]


@pytest.mark.parametrize(
    ("change", "text"),
    [(without_last_step, "STEP leaves out"), (without_waits, r"STEP\(.*\) does not wait for CLIP")],
)
def test_a_group_that_is_not_stepped_or_too_early_is_noticed(
    change: Callable[[list[Action]], list[Action]], text: str
):
    plan = edited(plan_of(ANALYZED, 2, (*STORES["ddp"], StepsByGroup())), change)
    found = "\n".join(str(diagnostic) for diagnostic in static_checks(plan))
    assert re.search(text, found), found


def test_an_optimizer_that_was_passed_is_refused():
    plan = plan_of(ANALYZED, 1, (*STORES["ddp"], StepsByGroup()))
    with pytest.raises(PlanError, match="an optimizer that was passed may count its steps"):
        run_on_threads(
            lambda world: executor_of(ANALYZED, plan, world, optimizer=torch.optim.Adagrad), plan.mesh
        )
