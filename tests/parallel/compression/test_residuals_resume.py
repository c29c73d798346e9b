"""What is owed survives a resume: to the bit under the same plan, in its sum under any other one."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.engine.step.executor import StepExecutor
from meshwright.parallel.compression.codecs.int4 import Int4Compression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.powersgd import PowerSGDCompression
from meshwright.parallel.compression.codecs.sign import SignCompression
from meshwright.parallel.compression.gradient_compression import GradientCompression
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.run.checkpoint.resume import state_changes
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import ANALYZED, coded_plan
from tests.tiny_model import executor_of, tiny_job, token_samples

STEPS = 3
BATCH = token_samples(12)
RESIDUAL = "state/compress/residual/"
SPLIT, SHARDED = mw.BatchSplit(), mw.BatchSplit("dp_shard")
OTHERS: dict[str, tuple[mw.Mesh, tuple[mw.Strategy, ...]]] = {
    "ddp on 2": (mw.Mesh(dp_replicate=2), (SPLIT, mw.DDP())),
    "ddp on 3": (mw.Mesh(dp_replicate=3), (SPLIT, mw.DDP())),
    "ddp on 6": (mw.Mesh(dp_replicate=6), (SPLIT, mw.DDP())),
    "zero 1 on 2": (mw.Mesh(dp_shard=2), (SHARDED, mw.ZeRO(stage=1))),
    "zero 2 on 3": (mw.Mesh(dp_shard=3), (SHARDED, mw.ZeRO(stage=2))),
    "zero 3 on 6": (mw.Mesh(dp_shard=6), (SHARDED, mw.ZeRO(stage=3))),
    "zero 3 on 2 x 3": (
        mw.Mesh(dp_shard=2, dp_replicate=3),
        (SHARDED, SPLIT, mw.ZeRO(stage=3, replicate_axis="dp_replicate")),
    ),
    "2 stages of 2 replicas": (mw.Mesh(pp=2, dp_replicate=2), (mw.Pipeline(), SPLIT, mw.DDP())),
}


def plan_on_4(codec: GradientCompression, **job: object) -> Plan:
    """ZeRO 2 over four ranks, with three microbatches."""
    strategies = (SHARDED, mw.ZeRO(stage=2), codec)
    return mw.make_plan(ANALYZED, tiny_job(**job), mw.Mesh(dp_shard=4), strategies, 1)


def train(world: World, executor: StepExecutor, num_steps: int) -> None:
    rows = list(executor.state.plan.samples_read(world.rank))
    batch = {key: value[rows] for key, value in BATCH.items()}
    for _ in range(num_steps):
        executor.step(batch)


def on_ranks(plan: Plan, play: Callable[[World, StepExecutor], object]) -> list:
    def run(world: World) -> object:
        executor = executor_of(ANALYZED, plan, world)
        try:
            return play(world, executor)
        finally:
            executor.close()

    return run_on_threads(run, plan.mesh)


def save(plan: Plan, folder: Path, load_from: Path | None = None, num_steps: int = STEPS) -> Path:
    """Trains `num_steps`, from a checkpoint if one is given; returns the checkpoint that it saves."""

    def play(world: World, executor: StepExecutor) -> None:
        if load_from is not None:
            executor.load_state_dict(load_tensors(load_from)[0], STEPS)
        train(world, executor, num_steps)
        save_tensors(folder, executor.steps_done, executor.state_dict(), {}, world.group(AXES), keep=9)

    on_ranks(plan, play)
    return max(folder.glob("step-*"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    saved, _ = load_tensors(folder)
    return {name: saved[name] for name in saved}


def shapes(folder: Path) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in tensors(folder).items()}


def owed(folder: Path) -> dict[str, torch.Tensor]:
    """The sum of all residuals of each parameter."""
    saved, _ = load_tensors(folder)
    return {name: saved[name].sum(0) for name in saved if name.startswith(RESIDUAL)}


@pytest.mark.parametrize("arrangement", ["ddp", "zero 1", "zero 3", "hybrid"])
@pytest.mark.parametrize("codec", [Int8Compression(rounding="stochastic"), SignCompression()], ids=str)
def test_the_same_plan_resumes_to_the_bit(arrangement: str, codec: GradientCompression, tmp_path: Path):
    plan = coded_plan(codec, arrangement)
    whole = save(plan, tmp_path / "whole", num_steps=2 * STEPS)
    half = save(plan, tmp_path / "half")
    resumed = save(plan, tmp_path / "resumed", half)
    assert resumed.name == whole.name
    expected, found = tensors(whole), tensors(resumed)
    assert expected.keys() == found.keys()
    assert [name for name, each in expected.items() if not torch.equal(each, found[name])] == []
    assert any(each.any() for name, each in expected.items() if name.startswith(RESIDUAL))


@pytest.mark.parametrize("name", OTHERS)
def test_from_4_ranks_any_other_plan_owes_the_same_in_sum(name: str, tmp_path: Path):
    mesh, strategies = OTHERS[name]
    codec = SignCompression()
    four = save(plan_on_4(codec), tmp_path / "four")
    other = mw.make_plan(ANALYZED, tiny_job(), mesh, (*strategies, codec), 1)
    before, after = owed(four), owed(save(other, tmp_path / "other", four, num_steps=0))
    assert before.keys() == after.keys()
    for key, each in before.items():
        assert each.abs().max() > 1e-6, key
        torch.testing.assert_close(after[key], each, rtol=1e-12, atol=1e-15)
    back = owed(save(plan_on_4(codec), tmp_path / "back", max((tmp_path / "other").glob("step-*")), 0))
    for key, each in before.items():
        torch.testing.assert_close(back[key], each, rtol=1e-12, atol=1e-15)


def test_another_codec_takes_over_what_is_owed(tmp_path: Path):
    """It belongs to gradients, whatever lost it."""
    saved = save(plan_on_4(SignCompression()), tmp_path / "sign")
    other = plan_on_4(Int4Compression())
    assert state_changes(shapes(saved), other) == []
    before, after = owed(saved), owed(save(other, tmp_path / "int4", saved, num_steps=0))
    assert all(torch.equal(each, after[key]) for key, each in before.items())


def test_what_a_checkpoint_or_a_plan_lacks_is_told(tmp_path: Path):
    coded, exact = plan_on_4(Int8Compression()), mw.make_plan(ANALYZED, tiny_job(), *_without_codec())
    without, with_residuals = save(exact, tmp_path / "exact"), save(coded, tmp_path / "coded")
    first, number = "residual/embed.weight", len(ANALYZED.model_spec.trainable)
    (told,) = state_changes(shapes(without), coded)
    assert told == (
        "what compress keeps from step to step is not in that checkpoint and begins anew: "
        f"{first} and {number - 1} more"
    )
    assert not any(each.any() for each in owed(save(coded, tmp_path / "anew", without, 0)).values())
    (told,) = state_changes(shapes(with_residuals), exact)
    assert told.startswith("what compress keeps from step to step is in that checkpoint and is left out")
    assert state_changes(shapes(with_residuals), coded) == []
    some = plan_on_4(Int8Compression(params=("layers.*",)))
    (told,) = state_changes(shapes(with_residuals), some)
    assert f"{first} and 2 more" in told  # head.weight, head.bias


def test_a_resume_with_another_rank_of_powersgd_says_that_its_factors_begin_anew(tmp_path: Path):
    saved = save(plan_on_4(PowerSGDCompression(rank=2)), tmp_path / "two", num_steps=1)
    assert state_changes(shapes(saved), plan_on_4(PowerSGDCompression(rank=2))) == []
    one = plan_on_4(PowerSGDCompression(rank=1))
    (told,) = state_changes(shapes(saved), one)
    assert told.startswith(
        "what compress keeps from step to step has another shape in that checkpoint and begins anew: factor/"
    )
    assert re.search(r" \(\[2, \d+\] there, \[1, \d+\] here\)", told), told
    before, after = owed(saved), owed(save(one, tmp_path / "one", saved, num_steps=0))
    assert all(torch.equal(each, after[key]) for key, each in before.items())  # what is owed stays


def _without_codec() -> tuple[mw.Mesh, tuple[mw.Strategy, ...], int]:
    return mw.Mesh(dp_shard=4), (SHARDED, mw.ZeRO(stage=2)), 1


HALF = PrecisionConfig(compute="float16", loss_scale_window=2)


def residuals_at(loss_scale: float, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """What each rank owes after steps that begin with a loss scale, which doubles every second step."""
    plan = coded_plan(Int8Compression(), "zero 2", precision=replace(HALF, loss_scale=loss_scale))

    def play(world: World, executor: StepExecutor) -> dict[str, torch.Tensor]:
        train(world, executor, num_steps)
        return {key: each.clone() for key, each in executor.state.strategy_tensors.of("compress").items()}

    return on_ranks(plan, play)


def test_residuals_do_not_depend_on_the_loss_scale_of_float16():
    """Powers of two change no bit of what is scaled and divided again."""
    for low, high in zip(residuals_at(2.0**8, 5), residuals_at(2.0**11, 5), strict=True):
        for key, each in low.items():
            assert each.dtype == torch.float32
            assert each.any(), key
            torch.testing.assert_close(high[key], each, rtol=1e-2, atol=1e-2 * float(each.abs().max()))


def test_an_overflow_keeps_residuals_to_the_bit_and_halves_the_scale():
    plan = coded_plan(Int8Compression(), "zero 2", precision=replace(HALF, loss_scale=2.0**10))

    def play(world: World, executor: StepExecutor) -> list[bool]:
        train(world, executor, 1)
        of = executor.state.strategy_tensors.of
        before = {key: each.clone() for key, each in of("compress").items()}
        of("loss_scale")["value"].fill_(2.0**60)
        rows = list(executor.state.plan.samples_read(world.rank))
        metrics = executor.step({key: value[rows] for key, value in BATCH.items()})
        assert metrics.overflow
        kept = [torch.equal(each, before[key]) for key, each in of("compress").items()]
        of("loss_scale")["value"].fill_(2.0**10)
        train(world, executor, 1)
        return [*kept, all(each.isfinite().all() for each in of("compress").values())]

    for told in on_ranks(plan, play):
        assert all(told)
