"""Runs with evaluations: the best checkpoint is kept, early stopping is agreed on, and a resumed run repeats
all bitwise.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.plan.job.file_format import BEST_CHECKPOINT
from meshwright.plan.job.job import EvalConfig
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints, load_tensors
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER
from meshwright.run.data.eval_samples import EvalHistory
from meshwright.run.telemetry.callbacks import STOP, Callback, CallbackEvent
from tests.run.training.small_run import SmallRun, rises


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SmallRun:
    """A run that nobody disturbed; its best evaluation is that of step 6."""
    small_run = SmallRun(tmp_path_factory.mktemp("whole"), change=rises(6))
    small_run.play()
    return small_run


def test_evaluations_come_every_few_steps_and_at_the_end(tmp_path):
    small_run = SmallRun(tmp_path, steps=11)
    for ended in small_run.play():
        assert (ended.step, ended.stopped, ended.stop_reason) == (11, False, "")
    assert list(small_run.lines("evaluation")) == [3, 6, 9, 11]
    evaluation = small_run.lines("evaluation")[3]
    assert evaluation.keys() == {"kind", "step", "loss", "perplexity", "tokens", "seconds"}
    assert evaluation["seconds"] > 0
    rare = replace(small_run, folder=tmp_path / "rare", evaluate=EvalConfig(hold_out=7, every=0))
    rare.play()
    assert list(rare.lines("evaluation")) == [11]
    assert rare.losses() == small_run.losses(), "evaluations change no number of the training"


@pytest.mark.parametrize("hold_out", [0, 7])
def test_tasks_are_evaluated_on_all_ranks_with_the_samples_or_alone(tmp_path, hold_out: int):
    asked, heard = list[int](), list[dict[str, float]]()

    def run_tasks(rank: int) -> dict[str, float]:
        asked.append(rank)
        return {"small/acc": len(asked) / 100} if rank == 0 else {}

    small_run = SmallRun(
        tmp_path,
        steps=5,
        evaluate=EvalConfig(hold_out=hold_out, every=3, tasks=("small",)),
        run_tasks=run_tasks,
        callbacks=(Callback(on_evaluate=lambda event: heard.append(dict(event.evaluation))),),
    )
    small_run.play()
    assert sorted(asked) == [0, 0, 1, 1]
    lines = small_run.lines("tasks")
    assert list(lines) == [3, 5]
    assert lines[3].keys() == {"kind", "step", "eval/small/acc", "seconds"}
    assert [each["small/acc"] for each in heard] == [line["eval/small/acc"] for line in lines.values()]
    assert list(small_run.lines("evaluation")) == ([3, 5] if hold_out else [])
    assert all(("loss" in each) == bool(hold_out) for each in heard)


@pytest.mark.parametrize(("hold_out", "steps"), [(0, [5]), (7, [3, 5])])
def test_a_text_is_sampled_at_each_evaluation_and_after_the_last_step(tmp_path, hold_out: int, steps):
    heard = list[int]()
    small_run = SmallRun(
        tmp_path,
        steps=5,
        evaluate=EvalConfig(hold_out=hold_out, every=3),
        run={"sample_prompt": "def ", "sample_tokens": 3},
        sample_text=lambda: "def f()",
        callbacks=(Callback(on_evaluate=lambda event: heard.append(event.step)),),
    )
    (ended, _) = small_run.play()
    lines = small_run.lines("sample")
    assert list(lines) == steps
    assert [(line["prompt"], line["text"]) for line in lines.values()] == [("def ", "def f()")] * len(steps)
    assert ended.sample == "def f()"
    assert heard == (steps if hold_out else []), "a text alone is no evaluation"


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_evaluates_to_the_same(tmp_path, ranks):
    first, other = SmallRun(tmp_path / "two", steps=3), SmallRun(tmp_path / "others", ranks=ranks, steps=3)
    first.play()
    other.play()
    assert other.losses("evaluation")[3] == pytest.approx(first.losses("evaluation")[3], rel=1e-5)
    assert first.lines("evaluation")[3]["tokens"] == other.lines("evaluation")[3]["tokens"]


def test_the_best_checkpoint_stays_and_is_named(whole):
    assert whole.kept() == [6, 8, 12], "the newest two, and the best"
    assert whole.best() == {**BEST_CHECKPOINT.header, "step": 6, "folder": "step-00000006", "loss": 1.0}
    _, meta = load_tensors(whole.at(12))
    assert EvalHistory(**meta["eval_history"]).best_step == 6


def test_without_keep_best_no_checkpoint_more_is_saved(tmp_path):
    small_run = SmallRun(tmp_path, change=rises(6), run={"save_every": 4, "keep": 2, "keep_best": False})
    small_run.play()
    assert small_run.kept() == [8, 12]
    assert not (tmp_path / CHECKPOINTS_FOLDER / "best.json").exists()


@pytest.mark.parametrize("last", [2, 3, 5, 7, 9, 11])
def test_a_run_that_is_stopped_anywhere_evaluates_and_keeps_the_same(tmp_path, whole, last):
    small_run = SmallRun(tmp_path, change=rises(6), stop=lambda rank, done: rank == 1 and done == last - 1)
    for ended in small_run.play():
        assert (ended.step, ended.stopped) == (last, True)
    replace(small_run, stop=lambda rank, done: False).play()
    assert small_run.losses("evaluation") == {
        step: loss for step, loss in whole.losses("evaluation").items() if step != last
    }
    assert small_run.best() == whole.best()
    assert compare_checkpoints(small_run.at(12), whole.at(12)) == []


@pytest.mark.parametrize("gone", [6, 8, 12])
def test_a_kill_before_the_best_was_named_or_after_a_later_save_changes_nothing(tmp_path, whole, gone):
    """As if killed: everything from step `gone` on is lost, or the pointer was not yet written."""
    small_run = SmallRun(tmp_path, change=rises(6))
    small_run.play()
    (tmp_path / CHECKPOINTS_FOLDER / "best.json").unlink()
    for step in (step for step in small_run.kept() if step > gone):
        small_run.at(step).rename(tmp_path / f"lost-{step}")
    (ended, *_) = small_run.play()
    assert ended.eval_history.best_step == 6
    assert small_run.best() == whole.best()
    assert small_run.kept() == [6, 8, 12]
    assert str(ended.replay) == "" or "bit-identical" in str(ended.replay)


def test_an_evaluation_that_comes_out_differently_is_said(tmp_path):
    small_run = SmallRun(tmp_path, change=rises(6))
    small_run.play()
    (ended, *_) = replace(small_run, change=rises(5)).play(step=8)
    assert str(ended.replay) == "the evaluation at step 9 was repeated and differs: loss 4.0 then, 5.0 now"


def test_going_back_under_another_plan_forgets_a_best_that_was_set_aside(tmp_path):
    small_run = SmallRun(tmp_path, change=rises(6), run={"save_every": 4, "keep": 9})
    small_run.play()
    assert small_run.best()["step"] == 6
    other = replace(small_run, lr=2e-2, steps=5)
    other.play(step=4)
    assert other.best()["step"] == 5
    assert not small_run.at(6).exists()


def test_patience_ends_the_run_on_all_ranks_and_again(tmp_path):
    small_run = SmallRun(
        tmp_path, ranks=3, change=rises(3), evaluate=EvalConfig(hold_out=7, every=2, patience=2)
    )
    for ended in small_run.play():
        assert (ended.step, ended.stopped) == (6, False)
        assert "2 evaluations did not improve" in ended.stop_reason
        assert ended.checkpoint == small_run.at(6)
    for again in small_run.play():
        assert (again.step, again.loss, again.checkpoint) == (6, None, small_run.at(6))
        assert "2 evaluations did not improve" in again.stop_reason
    longer = replace(small_run, evaluate=replace(small_run.evaluate, patience=9))
    assert {ended.step for ended in longer.play()} == {12}


def test_callbacks_hear_of_evaluations_and_may_stop_the_run(tmp_path):
    heard: list[tuple[str, int, bool]] = []

    def note(name: str) -> Callable[[CallbackEvent], None]:
        return lambda moment: heard.append((name, moment.step, moment.is_best))

    def enough(moment: CallbackEvent) -> str | None:
        return STOP if moment.evaluation["loss"] < 2 else None

    names = ("on_train_begin", "on_step_end", "on_evaluate", "on_save", "on_train_end")
    spy = Callback(**{name: note(name) for name in names})
    small_run = SmallRun(tmp_path, change=rises(6), callbacks=(spy, Callback(on_evaluate=enough)))
    for ended in small_run.play():
        assert (ended.step, ended.stopped) == (7, True)
    assert [each for each in heard if each[0] == "on_evaluate"] == [
        ("on_evaluate", 3, True),
        ("on_evaluate", 6, True),
    ]
    assert [step for name, step, _ in heard if name == "on_save"] == [3, 4, 6, 7]
    assert heard[0][:2] == ("on_train_begin", 0)
    assert heard[-1][:2] == ("on_train_end", 7)
    assert len([each for each in heard if each[0] == "on_step_end"]) == 7


def test_a_callback_that_raises_ends_the_run(tmp_path):
    def fail(moment: CallbackEvent) -> None:
        raise ZeroDivisionError

    with pytest.raises(Exception, match=r"ZeroDivisionError|rank 0") as caught:
        SmallRun(tmp_path, ranks=1, callbacks=(Callback(on_step_end=fail),)).play()
    causes = {type(caught.value), type(caught.value.__cause__)}
    assert ZeroDivisionError in causes
