"""The example strategy that quantizes gradients: its bytes, its error, its residual in checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright as mw
from examples.int8_gradients import Int8Gradients
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.program import Action, Transfer
from meshwright.run.checkpoint.distributed_checkpoint import load_tensors, save_tensors
from meshwright.testing.ranks import run_on_threads
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import analyzed_model, case_of, edited, executor_of, plan_of, token_samples, verdict_of

ANALYZED = analyzed_model()
STRATEGIES = BatchSplit(), DDP(), Int8Gradients(block=32)
BATCH = token_samples(12)
SCATTERED = Transfer("all_to_all", ("dp_replicate",), 1024, dtype="int8")


def test_it_sends_what_it_says_and_stays_within_its_tolerance():
    plan = plan_of(ANALYZED, 3, STRATEGIES)
    assert static_checks(plan) == []
    traced = mw.trace(ANALYZED, plan)
    assert traced.passed, traced
    verdict = verdict_of(case_of(ANALYZED, plan))
    assert verdict.passed, verdict
    (reduce,) = (action for action in plan.program.roles[0].actions if action.kind == "REDUCE")
    codes, scales = reduce.transfer.messages
    numel = sum(param.numel for param in ANALYZED.model_spec.trainable)
    assert 0 <= codes.nbytes - numel < 32
    assert scales.nbytes == codes.nbytes // 32 * 8


def trained(world: World, folder: Path, steps: int, resumed: bool) -> dict[str, torch.Tensor]:
    """The parameters after `steps` more steps, from the checkpoint in `folder` if `resumed`; saved there."""
    plan = plan_of(ANALYZED, 3, STRATEGIES)
    executor, rows = executor_of(ANALYZED, plan, world), slice(4 * world.rank, 4 * world.rank + 4)
    if resumed:
        executor.load_state_dict(load_tensors(folder / "step-00000002")[0], 2)
    for _ in range(steps):
        executor.step({key: value[rows] for key, value in BATCH.items()})
    state = executor.state_dict()
    if not resumed:
        save_tensors(folder, executor.steps_done, state, {}, world.group(AXES), keep=9)
    found = {name: value.clone() for name, value in executor.gather_parameters().items()}
    executor.close()
    return found


def test_a_run_that_resumes_with_its_residual_repeats_every_bit(tmp_path: Path):
    mesh = plan_of(ANALYZED, 3, STRATEGIES).mesh
    whole = run_on_threads(lambda world: trained(world, tmp_path / "whole", 4, resumed=False), mesh)
    run_on_threads(lambda world: trained(world, tmp_path / "half", 2, resumed=False), mesh)
    saved, _ = load_tensors(tmp_path / "half" / "step-00000002")
    residuals = [name for name in saved if name.startswith("state/int8_gradients/residual/")]
    assert len(residuals) == len(ANALYZED.model_spec.trainable)
    assert saved[residuals[0]].shape[0] == 3, "a summand of each rank"
    resumed = run_on_threads(lambda world: trained(world, tmp_path / "half", 2, resumed=True), mesh)
    for mine, theirs in zip(whole, resumed, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_messages_that_cannot_carry_the_sum_are_named():
    def scattered(action: Action) -> Action:
        is_sum = action.kind == "REDUCE"
        return (
            replace(action, transfer=replace(action.transfer, carried_by=(SCATTERED,))) if is_sum else action
        )

    changed = edited(plan_of(ANALYZED, 3, STRATEGIES), lambda actions: list(map(scattered, actions)))
    (diagnostic,) = static_checks(changed)
    assert "means all_reduce over dp_replicate, and its last message is all_to_all" in str(diagnostic)


def test_gradients_that_zero_scatters_are_refused():
    with pytest.raises(PlanError, match=r"zero scatters them(?s:.*)use the strategy .ddp."):
        plan_of(ANALYZED, 3, (BatchSplit(), ZeRO(axis="dp_replicate"), Int8Gradients()))
