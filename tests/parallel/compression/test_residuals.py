"""What is owed: kept to the bit by steps that are left out, and saved and resharded with its sum."""

from collections.abc import Callable
from pathlib import Path
from threading import get_ident

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.topk import TopKCompression
from meshwright.plan.job.job import LossGuard
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan, hybrid, job_of
from tests.parallel.tensor.odd_llama import TOKENS, analyzed_llama, batches
from tests.tiny_model import executor_of, plan_of, tiny_job, token_samples

BATCH = token_samples(24)


def local(world: World, executor: StepExecutor) -> dict[str, torch.Tensor]:
    rows = executor.state.plan.samples_read(world.rank)
    return {key: value[list(rows)] for key, value in BATCH.items()}


def states(executor: StepExecutor) -> dict[str, torch.Tensor]:
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


CODECS = {
    "int8": Int8Compression(),
    "powersgd": PowerSGDCompression(rank=1),
    "topk": TopKCompression(density=0.2, momentum=0.5),
}


@pytest.mark.parametrize(
    ("codec", "arrangement"),
    [
        *((codec, each) for codec in ("int8", "powersgd") for each in ("ddp", "zero 2", "hybrid")),
        *(("topk", each) for each in ("ddp", "zero 2")),
    ],
)
def test_a_step_that_the_guard_leaves_out_keeps_every_bit(arrangement: str, codec: str):
    plan = coded_plan(CODECS[codec], arrangement, guard=LossGuard("skip", window=2))

    def play(world: World, executor: StepExecutor) -> None:
        for _ in range(2):
            executor.step(local(world, executor))
        before = states(executor)
        assert any(each.any() for each in before.values())
        with torch.no_grad():
            kept = executor.state.flat_params, executor.state.trained_module.parameters
            for parameter in kept[1].values():
                parameter.mul_(float("nan")) if parameter.is_leaf and parameter.dim() == 1 else None
        metrics = executor.step(local(world, executor))
        assert metrics.is_skipped
        after = states(executor)
        assert all(torch.equal(before[key], after[key]) for key in before)

    on_ranks(plan, play)


def test_with_a_guard_the_factors_of_matrices_of_other_shards_stay(monkeypatch: pytest.MonkeyPatch):
    fresh, stepping, (strategies, mesh) = torch.empty_like, set[int](), hybrid(2)

    def unwritten(tensor: torch.Tensor, **how: object) -> torch.Tensor:
        found = fresh(tensor, **how)
        return found.fill_(float("nan")) if get_ident() in stepping and found.is_floating_point() else found

    def play(world: World) -> None:
        analyzed, (batch,) = analyzed_llama(), batches(1, samples=12)
        job = tiny_job(data=mw.DataConfig("random", sequence=TOKENS), guard=LossGuard("skip", window=2))
        plan = mw.make_plan(analyzed, job, mesh, (*strategies, PowerSGDCompression(rank=1)))
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            stepping.add(get_ident())
            trainer.step(trainer.local_batch(batch))
            assert all(each.isfinite().all() for each in states(trainer.executor).values())

    monkeypatch.setattr(torch, "empty_like", unwritten)
    run_on_threads(play, mesh)


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_in_which_nothing_counts_keeps_every_bit(codec: str):
    def play(world: World, executor: StepExecutor) -> None:
        executor.step(local(world, executor))
        before = states(executor)
        assert executor.step(None).is_skipped
        after = states(executor)
        assert all(torch.equal(before[key], after[key]) for key in before)

    on_ranks(coded_plan(CODECS[codec]), play)


def owed(folder: Path) -> dict[str, torch.Tensor]:
    saved, _ = load_tensors(folder)
    found = {name: saved[name] for name in saved if name.startswith("state/compress/residual/")}
    return {name: value.sum(0) for name, value in found.items()}


def save_after_two_steps(plan: Plan, folder: Path) -> None:
    def save(world: World, executor: StepExecutor) -> None:
        for _ in range(2):
            executor.step(local(world, executor))
        save_tensors(folder, 2, executor.state_dict(), {}, world.group(AXES), keep=9)

    on_ranks(plan, save)


@pytest.mark.parametrize("arrangement", ["ddp", "zero 2", "hybrid"])
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(arrangement: str, tmp_path: Path):
    plan = coded_plan(CODECS["powersgd"], arrangement)
    save_after_two_steps(plan, tmp_path)

    def continued(world: World, executor: StepExecutor, steps: int) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            executor.step(local(world, executor))
        return {**executor.gather_parameters(), **states(executor)}

    def resumed(world: World, executor: StepExecutor) -> dict[str, torch.Tensor]:
        executor.load_state_dict(load_tensors(tmp_path / "step-00000002")[0], 2)
        return continued(world, executor, 2)

    straight = on_ranks(plan, lambda world, executor: continued(world, executor, 4))
    for mine, theirs in zip(straight, on_ranks(plan, resumed), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


RESUMED = {
    "2 ranks": lambda codec: plan_of(ANALYZED, 2, (mw.BatchSplit(), mw.DDP(), codec), job=job_of(codec)),
    "6 ranks": lambda codec: plan_of(ANALYZED, 6, (mw.BatchSplit(), mw.DDP(), codec), job=job_of(codec)),
    "zero 2": lambda codec: coded_plan(codec, "zero 2"),
    "hybrid": lambda codec: coded_plan(codec, "hybrid"),
}


@pytest.mark.parametrize(
    ("saved", "codec", "resumed", "to"),
    [
        ("ddp", "int8", "2 ranks", "int8"),
        ("ddp", "powersgd", "2 ranks", "powersgd"),
        ("ddp", "topk", "2 ranks", "topk"),
        ("ddp", "topk", "6 ranks", "topk"),
        ("ddp", "powersgd", "hybrid", "powersgd"),
        ("hybrid", "powersgd", "zero 2", "powersgd"),
        ("zero 2", "int8", "hybrid", "powersgd"),
    ],
)
def test_other_ranks_stages_and_codecs_owe_the_same_in_sum(
    saved: str, codec: str, resumed: str, to: str, tmp_path: Path
):
    def load_and_save(world: World, executor: StepExecutor) -> None:
        executor.load_state_dict(load_tensors(tmp_path / "step-00000002")[0], 2)
        save_tensors(tmp_path / "other", 2, executor.state_dict(), {}, world.group(AXES), keep=9)

    save_after_two_steps(coded_plan(CODECS[codec], saved), tmp_path)
    on_ranks(RESUMED[resumed](CODECS[to]), load_and_save)
    before, after = owed(tmp_path / "step-00000002"), owed(tmp_path / "other" / "step-00000002")
    assert any(each.any() for each in before.values())
    for name, each in before.items():
        torch.testing.assert_close(after[name], each, rtol=1e-12, atol=1e-15)
