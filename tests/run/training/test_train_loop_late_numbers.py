"""The training loop where numbers of a step arrive late: the next step records them, or what needs them."""

import logging

import pytest

from meshwright.engine.step.executor import StepExecutor
from meshwright.plan.job.errors import PlanError
from meshwright.run.telemetry.callbacks import Callback, CallbackEvent
from tests.engine.late_copies import LateCopies
from tests.run.training.small_run import SmallRun

STEPS = 6


@pytest.fixture
def late_numbers(monkeypatch):
    monkeypatch.setattr("meshwright.engine.runtime.rank_state.DeviceCopies", LateCopies)


def watch(events: list[str]) -> Callback:
    def note(name: str):
        return lambda event: events.append(f"{name} {event.step}")

    return Callback(on_step_end=note("record"), on_evaluate=note("evaluate"), on_save=note("save"))


def test_a_step_is_recorded_by_the_next_one_and_before_what_needs_it(tmp_path, monkeypatch, late_numbers):
    events: list[str] = []
    step = StepExecutor.step

    def noted(self, *args, **kwargs):
        metrics = step(self, *args, **kwargs)
        if self.state.world.rank == 0:
            events.append(f"step {metrics.step}")
        return metrics

    monkeypatch.setattr(StepExecutor, "step", noted)
    saves = {"save_every": 4, "keep_best": False}
    run = SmallRun(tmp_path / "late", steps=STEPS, callbacks=(watch(events),), run=saves)
    run.play()
    assert events == [
        *("step 1", "step 2", "record 1", "step 3", "record 2", "record 3", "evaluate 3"),
        *("step 4", "record 4", "save 4", "step 5", "step 6", "record 5"),
        *("record 6", "evaluate 6", "save 6"),
    ]
    monkeypatch.undo()
    usual = SmallRun(tmp_path / "usual", steps=STEPS)
    usual.play()
    assert run.losses() == usual.losses()


def test_what_is_wrong_with_the_last_step_is_found_before_a_checkpoint(tmp_path, caplog, late_numbers):
    def spoil(rank: int, executor: StepExecutor) -> None:
        for parameter in executor.state.trained_module.parameters.values():
            parameter.data.fill_(float("nan"))

    saved: list[int] = []

    def on_save(event: CallbackEvent) -> None:
        saved.append(len([text for text in caplog.messages if "unusable from here on" in text]))

    run = SmallRun(tmp_path, steps=4, change=spoil, callbacks=(Callback(on_save=on_save),))
    with caplog.at_level(logging.WARNING):
        run.play()
    assert saved == [1]


def test_an_epoch_in_which_nothing_counts_ends_the_run_without_a_checkpoint(tmp_path, late_numbers):
    def nothing_counts(rank: int, executor: StepExecutor) -> None:
        executor.state.token_counter.loss_weight = lambda microbatch: 0.0
        totals = executor.state.token_counter.totals
        executor.state.token_counter.totals = lambda: (0.0, *totals()[1:])

    run = SmallRun(tmp_path, steps=4, change=nothing_counts, run={"save_every": 2})
    with pytest.raises(PlanError, match="all trained on up to step 2"):
        run.play()
    assert not run.at(2).exists()
