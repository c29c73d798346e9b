"""What is owed: kept to the bit by steps that are left out, and saved and resharded with its sum."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.parallel.compression.int8 import Int8Compression
from meshwright.parallel.compression.topk import TopKCompression
from meshwright.plan.job.job import LossGuard
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan
from tests.tiny_model import executor_of, plan_of, token_samples

BATCH = token_samples(24)


def local(world: World, executor: StepExecutor) -> dict[str, torch.Tensor]:
    rows = executor.state.plan.samples_read(world.rank)
    return {key: value[list(rows)] for key, value in BATCH.items()}


def residuals(executor: StepExecutor) -> dict[str, torch.Tensor]:
    found = executor.state.strategy_tensors.of("compress")
    return {key: each.clone() for key, each in found.items()}


def on_ranks(plan: Plan, play: Callable[[World, StepExecutor], object]) -> list:
    def run(world: World) -> object:
        executor = executor_of(ANALYZED, plan, world)
        try:
            return play(world, executor)
        finally:
            executor.close()

    return run_on_threads(run, plan.mesh)


MOMENTUM = TopKCompression(density=0.2, momentum=0.5)


@pytest.mark.parametrize(
    ("codec", "arrangement"),
    [
        *((Int8Compression(), each) for each in ("ddp", "zero 2", "hybrid")),
        *((MOMENTUM, each) for each in ("ddp", "zero 2")),
    ],
)
def test_a_step_that_the_guard_leaves_out_keeps_every_bit(codec: GradientCompression, arrangement: str):
    plan = coded_plan(codec, arrangement, guard=LossGuard("skip", window=2))

    def play(world: World, executor: StepExecutor) -> None:
        for _ in range(2):
            executor.step(local(world, executor))
        before = residuals(executor)
        assert any(each.any() for each in before.values())
        with torch.no_grad():
            kept = executor.state.flat_params, executor.state.trained_module.parameters
            for parameter in kept[1].values():
                parameter.mul_(float("nan")) if parameter.is_leaf and parameter.dim() == 1 else None
        metrics = executor.step(local(world, executor))
        assert metrics.is_skipped
        after = residuals(executor)
        assert all(torch.equal(before[key], after[key]) for key in before)

    on_ranks(plan, play)


def test_a_step_in_which_nothing_counts_keeps_every_bit():
    def play(world: World, executor: StepExecutor) -> None:
        executor.step(local(world, executor))
        before = residuals(executor)
        assert executor.step(None).is_skipped
        after = residuals(executor)
        assert all(torch.equal(before[key], after[key]) for key in before)

    on_ranks(coded_plan(Int8Compression()), play)


def owed(folder: Path) -> dict[str, torch.Tensor]:
    saved, _ = load_tensors(folder)
    found = {name: saved[name] for name in saved if name.startswith("state/compress/")}
    return {name: value.sum(0) for name, value in found.items()}


@pytest.mark.parametrize("codec", [Int8Compression(), MOMENTUM])
@pytest.mark.parametrize("ranks", [2, 6])
def test_other_ranks_owe_the_same_in_sum(codec: GradientCompression, ranks: int, tmp_path: Path):
    plan = coded_plan(codec)

    def save(world: World, executor: StepExecutor) -> None:
        for _ in range(2):
            executor.step(local(world, executor))
        save_tensors(tmp_path, 2, executor.state_dict(), {}, world.group(AXES), keep=9)

    def load_and_save(world: World, executor: StepExecutor) -> None:
        executor.load_state_dict(load_tensors(tmp_path / "step-00000002")[0], 2)
        save_tensors(tmp_path / "two", 2, executor.state_dict(), {}, world.group(AXES), keep=9)

    on_ranks(plan, save)
    on_ranks(plan_of(ANALYZED, ranks, plan.strategies), load_and_save)
    before, after = owed(tmp_path / "step-00000002"), owed(tmp_path / "two" / "step-00000002")
    assert any(each.any() for each in before.values())
    for name, each in before.items():
        torch.testing.assert_close(after[name], each, rtol=1e-12, atol=1e-15)
