"""Runs with a loss guard: harmful steps are skipped or end the run, and a resumed run decides the same."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch

from meshwright.engine.runtime.loss_guard import LossSpikeError
from meshwright.plan.job.job import EvalConfig, LossGuard
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints
from meshwright.run.data.data_loader import open_local_batches
from meshwright.run.data.eval_samples import split_held_out
from meshwright.run.telemetry.callbacks import Callback
from tests.run.training.small_run import DATA, SmallRun


def poisoned(at: int) -> Callable[[int, Any], None]:
    """The loss of rank 1 is NaN in step `at`."""

    def change(rank: int, executor: Any) -> None:
        usual = executor.state.loss

        def total(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
            bad = rank == 1 and executor.steps_done == at - 1 and torch.is_grad_enabled()
            return usual.total(outputs, batch) * (nan if bad else 1)

        executor.state.loss = replace(usual, total=total)

    return change


def test_a_skipped_step_is_counted_and_written_down_with_its_samples(tmp_path):
    told: list[str] = []
    spy = Callback(on_step_end=lambda moment: told.append(moment.spike))
    run = SmallRun(tmp_path, guard=LossGuard("skip"), change=poisoned(5), callbacks=(spy,))
    for ended in run.play():
        assert (ended.step, ended.num_skipped) == (12, 1)
    (line,) = run.lines("spike").values()
    assert (line["step"], line["action"], line["reasons"][0]) == (5, "skip", "the loss is nan")
    plan = run.plan
    local_batches = open_local_batches(split_held_out(DATA, plan.job.evaluate)[0], plan, 0)
    assert [rank["samples"] for rank in line["ranks"]] == local_batches.sample_ids(4)
    assert [rank["phase"] for rank in line["ranks"]] == ["", "loss"]
    assert run.lines()[5]["skipped"]
    assert [step for step, spike in enumerate(told, start=1) if spike] == [5]


def test_a_run_that_stops_at_a_spike_saves_nothing_new(tmp_path):
    run = SmallRun(tmp_path, guard=LossGuard("stop"), change=poisoned(7))
    with pytest.raises(Exception, match="step 7: the loss is nan") as caught:
        run.play()
    error = caught.value if isinstance(caught.value, LossSpikeError) else caught.value.__cause__
    assert isinstance(error, LossSpikeError)
    samples = open_local_batches(split_held_out(DATA, run.plan.job.evaluate)[0], run.plan, 0).sample_ids(6)[1]
    assert (
        f"rank 1: loss nan, gradient norm nan; the forward is finite and the loss is not; samples "
        f"{samples[0]}, "
    ) in str(error)
    assert max(run.kept()) == 6
    assert max(run.lines()) == 6
    assert list(run.lines("spike")) == [7]


@pytest.mark.parametrize("last", [3, 6, 8])
def test_the_guard_judges_after_a_resume_as_if_nothing_had_happened(tmp_path, last):
    """With a low factor many steps are skipped, and which ones depends on the whole window."""
    guard = LossGuard("skip", factor=1.02, window=3)
    straight = SmallRun(tmp_path / "straight", guard=guard)
    (ended, *_) = straight.play()
    assert 0 < ended.num_skipped < 9
    run = replace(straight, folder=tmp_path / "stopped", stop=lambda rank, done: done == last - 1)
    run.play()
    replace(run, stop=lambda rank, done: False).play()
    assert {step for step, line in run.lines().items() if line["skipped"]} == {
        step for step, line in straight.lines().items() if line["skipped"]
    }
    assert compare_checkpoints(run.at(12), straight.at(12)) == []


def test_without_a_guard_the_first_step_that_is_not_finite_is_named_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="meshwright.run.training.train_loop"):
        SmallRun(tmp_path, evaluate=EvalConfig(), change=poisoned(5)).play()
    (record,) = [record for record in caplog.records if record.name == "meshwright.run.training.train_loop"]
    assert record.getMessage().startswith(
        "step 5: the loss is nan and the gradient norm nan; the parameters are unusable"
    )
