"""The training loop, ranks as threads: what it saves, where it resumes, and that it does so bitwise."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from meshwright.comm.backends.threads import ThreadGroup
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import IGNORE_INDEX
from meshwright.plan.job.checkpoint_logging_config import RunConfig
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import LRScheduleConfig, OptimizerConfig, PrecisionConfig
from meshwright.plan.plan import Plan
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints
from meshwright.run.checkpoint.resume import CHECKPOINTS_FOLDER, ResumeResult, resume
from meshwright.run.data.data_loader import ExampleDataset, open_local_batches
from meshwright.run.launch.failure_record import RankProgress
from meshwright.run.telemetry.callbacks import Callback, CallbackEvent, StepRecord
from meshwright.run.telemetry.metrics_log import read_metrics
from meshwright.run.training.train_loop import TrainResult, save_run_checkpoint, train_loop
from meshwright.testing.ranks import run_on_threads
from tests.tiny_model import analyzed_model, executor_of, plan_of, tiny_job, token_samples

STEPS = 12
ANALYZED = analyzed_model(p=0.1)
SPARE = analyzed_model(spare=True)


@dataclass(frozen=True)
class SmallRun:
    """A run of `ranks` threads in `folder`; `stop(rank, steps_done)` is asked before each step."""

    folder: Path
    ranks: int = 2
    epochs: int = 0
    save_every: int = 4
    lr: float = 1e-2
    analyzed: AnalyzedModel = ANALYZED
    count: int = 24
    keep: int = 9
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    stop: Callable[[int, int], bool] = lambda rank, done: False

    @property
    def plan(self) -> Plan:
        job = tiny_job(
            optimizer=OptimizerConfig("adamw", lr=self.lr),
            lr_schedule=LRScheduleConfig("cosine", warmup=2, floor=0.1),
            precision=self.precision,
            data=DataConfig("example", epochs=self.epochs),
        )
        made = plan_of(self.analyzed, self.ranks, job=replace(job, train=replace(job.train, steps=STEPS)))
        return replace(made, run=RunConfig(str(self.folder), save_every=self.save_every, keep=self.keep))

    def play(self, step: int | None = None) -> list[tuple[ResumeResult, TrainResult, list[StepRecord]]]:
        """Resume (from `step`) and train to the end; what each rank got back, and the lines it was shown."""
        data, plan = ExampleDataset(token_samples(self.count)), self.plan

        def rank(world: World) -> tuple[ResumeResult, TrainResult, list[StepRecord]]:
            executor, lines = executor_of(self.analyzed, plan, world), []
            resumed = resume(executor, plan, world, data.digest, step)
            local_batches = open_local_batches(data, plan, world.rank)
            ended = train_loop(
                executor,
                plan,
                local_batches,
                world,
                lambda: self.stop(world.rank, executor.steps_done),
                (listing(lines),),
            )
            executor.close()
            return resumed, ended, lines

        return run_on_threads(rank, plan.mesh)

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.folder / CHECKPOINTS_FOLDER).iterdir())

    def journal(self) -> dict[int, tuple[float, float, int]]:
        lines = read_metrics(self.folder / "metrics.jsonl")
        return {line["step"]: (line["loss"], line["grad_norm"], line["tokens"]) for line in lines}


def listing(lines: list[StepRecord]) -> Callback:
    """A callback that adds the line of each step to `lines`."""

    def on_step_end(moment: CallbackEvent) -> None:
        if moment.step_record is not None:
            lines.append(moment.step_record)

    return Callback(on_step_end=on_step_end)


def at(folder: Path, step: int) -> Path:
    return step_folder(folder / CHECKPOINTS_FOLDER, step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SmallRun:
    """A run of two ranks that nobody disturbed."""
    small_run = SmallRun(tmp_path_factory.mktemp("whole"))
    small_run.play()
    return small_run


def test_a_run_saves_every_few_steps_and_at_the_end(tmp_path, whole):
    assert whole.kept() == ["step-00000004", "step-00000008", "step-00000012"]
    rare = SmallRun(tmp_path / "rare", save_every=0)
    (_, ended, _), _ = rare.play()
    assert rare.kept() == ["step-00000012"]
    assert ended.checkpoint == at(rare.folder, STEPS)
    assert not ended.stopped
    few = SmallRun(tmp_path / "few", save_every=5, keep=2)
    few.play()
    assert few.kept() == ["step-00000010", "step-00000012"]


def test_rank_0_is_shown_every_step_and_the_journal_holds_the_same(tmp_path):
    small_run = SmallRun(tmp_path)
    (_, ended, lines), (_, _, others) = small_run.play()
    assert [line.step for line in lines] == list(range(1, STEPS + 1))
    assert others == []
    assert {line.step: (line.loss, line.grad_norm, line.tokens) for line in lines} == small_run.journal()
    assert all(line.tokens_per_s == pytest.approx(line.tokens / line.seconds) for line in lines)
    assert lines[0].lr == pytest.approx(small_run.lr / 3), "the first of two steps on the way up"
    assert (ended.step, ended.loss) == (STEPS, lines[-1].loss)


@pytest.mark.parametrize("last", [1, 4, 7, 11])
def test_a_run_that_one_rank_asks_to_stop_stops_everywhere_and_goes_on_bit_for_bit(tmp_path, whole, last):
    small_run = SmallRun(tmp_path, stop=lambda rank, done: rank == 1 and done == last - 1)
    for _, ended, _ in small_run.play():
        assert (ended.step, ended.stopped, ended.checkpoint) == (last, True, at(tmp_path, last))
    for resumed, ended, _ in SmallRun(tmp_path).play():
        assert (resumed.step, resumed.notes[0]) == (last, f"resumed from step {last}")
        assert (ended.step, ended.stopped) == (STEPS, False)
    assert small_run.journal() == whole.journal()
    assert compare_checkpoints(at(tmp_path, STEPS), at(whole.folder, STEPS)) == []


@pytest.mark.parametrize(("ranks", "told"), [(2, False), (3, True)])
def test_sums_over_another_transport_are_said_where_more_than_two_ranks_add(
    tmp_path, monkeypatch, ranks, told
):
    SmallRun(tmp_path, ranks=ranks, stop=lambda rank, done: done == 6).play()
    monkeypatch.setattr(ThreadGroup, "transport", "pigeons")
    (resumed, _, _), *_ = SmallRun(tmp_path, ranks=ranks).play()
    words = (
        "sums over dp_replicate went through threads and now go through pigeons: from here on the last "
        "bits may differ"
    )
    assert (words in resumed.notes) == told


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_goes_on_with_the_same_samples(tmp_path, whole, ranks):
    SmallRun(tmp_path, stop=lambda rank, done: done == 6).play()
    (resumed, _, _), *_ = SmallRun(tmp_path, ranks=ranks).play()
    assert resumed.step == 7
    assert any(f"mesh.dp_replicate was 2, is {ranks}" in note for note in resumed.notes)
    mine, theirs = SmallRun(tmp_path).journal(), whole.journal()
    assert mine.keys() == theirs.keys()
    assert all(mine[step][2] == theirs[step][2] for step in theirs), "the same tokens count"
    assert all(mine[step][0] == pytest.approx(theirs[step][0], abs=1e-5) for step in theirs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_finite_data_ends_the_run_with_a_short_batch(tmp_path, ranks):
    """31 rows in steps of 12: the third step has 7, and with three ranks the last rank has none of them."""
    small_run = SmallRun(tmp_path, ranks=ranks, epochs=1, count=31)
    for _, ended, _ in small_run.play():
        assert (ended.step, ended.stopped) == (3, False)
    assert small_run.kept() == ["step-00000003"]
    assert sum(tokens for _, _, tokens in small_run.journal().values()) == int(
        (token_samples(31)["labels"] != -100).sum()
    )
    alone = SmallRun(tmp_path / "alone", ranks=1, epochs=1, count=31)
    alone.play()
    assert all(
        small_run.journal()[step][0] == pytest.approx(alone.journal()[step][0], abs=1e-5)
        for step in (1, 2, 3)
    )


def test_a_run_whose_data_changed_says_so(tmp_path):
    SmallRun(tmp_path, stop=lambda rank, done: done == 3).play()
    (resumed, _, _), _ = SmallRun(tmp_path, count=25).play()
    assert resumed.notes == ("resumed from step 4", "the data changed since that checkpoint")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path, whole):
    with pytest.raises(PlanError) as caught:
        whole.play(step=5)
    (fault,) = caught.value.diagnostics
    assert fault.problem == "there is no checkpoint of step 5"
    assert fault.fix == "choose one of: 4, 8, 12"


def test_going_back_without_a_change_leaves_later_checkpoints_where_they_are(tmp_path):
    small_run = SmallRun(tmp_path)
    small_run.play()
    before = {path: path.stat().st_mtime_ns for path in at(tmp_path, 8).iterdir()}
    (resumed, ended, _), _ = small_run.play(step=4)
    assert resumed.notes == ("resumed from step 4",)
    assert str(ended.replay) == "8 steps were repeated from step 5: all are bit-identical"
    assert {path: path.stat().st_mtime_ns for path in at(tmp_path, 8).iterdir()} == before


def test_going_back_to_another_history_replaces_no_checkpoint_silently(tmp_path):
    SmallRun(tmp_path).play()
    other = SmallRun(tmp_path, lr=0.3)
    (resumed, _, _), _ = other.play(step=4)
    assert any(
        note.startswith("later checkpoints were retired: step-00000008.aside-") for note in resumed.notes
    )
    aside = [name for name in other.kept() if ".aside-" in name]
    assert [name.split(".")[0] for name in aside] == ["step-00000008", "step-00000012"]
    moved = tmp_path / "looked at" / "step-00000008"
    moved.parent.mkdir()
    (tmp_path / CHECKPOINTS_FOLDER / aside[0]).rename(moved)
    assert compare_checkpoints(moved, at(tmp_path, 8)) != []
    (again, _, _), _ = other.play()
    assert again.notes == ("resumed from step 12",), "the newest is of the new course"


def test_newer_checkpoints_of_another_model_are_passed_over(tmp_path):
    SmallRun(tmp_path, stop=lambda rank, done: done == 3).play()
    foreign = SmallRun(tmp_path / "foreign", analyzed=SPARE, stop=lambda rank, done: done == 5)
    foreign.play()
    at(tmp_path / "foreign", 6).rename(at(tmp_path, 6))
    (resumed, _, _), _ = SmallRun(tmp_path, stop=lambda rank, done: done == 4).play()
    assert resumed.step == 4
    assert resumed.notes[1].startswith(
        "skipped step-00000006: it is of another model: model/layers.3.linear.bias: (6,) saved"
    )


def test_a_failure_can_say_where_it_happened(tmp_path):
    small_run = SmallRun(tmp_path, ranks=1, save_every=2)
    data, progress, seen = ExampleDataset(token_samples()), RankProgress(), []

    def rank(world: World) -> None:
        executor = executor_of(small_run.analyzed, small_run.plan, world)
        local_batches = open_local_batches(data, small_run.plan, 0)
        watch = Callback(on_step_end=lambda moment: seen.append((moment.step, progress.step, progress.phase)))
        train_loop(executor, small_run.plan, local_batches, world, lambda: False, (watch,), progress)
        executor.close()

    run_on_threads(rank, small_run.plan.mesh)
    assert seen == [(step, step, "training") for step in range(1, STEPS + 1)]
    assert (progress.step, progress.phase) == (STEPS, "ending")


def test_steps_whose_gradients_overflow_are_counted_and_a_resumed_run_knows_the_scale(tmp_path: Path):
    precision = PrecisionConfig(
        "float16", "float16", "float16", master="float32", loss_scale=2.0**20, loss_scale_window=3
    )
    (_, ended, lines), (_, other, _) = SmallRun(tmp_path / "whole", precision=precision).play()
    left_out = [line for line in lines if line.overflow]
    assert ended.num_overflows == other.num_overflows == len(left_out) > 1
    assert all(line.skipped for line in left_out)
    assert ended.num_skipped == 0
    parts = SmallRun(tmp_path / "parts", precision=precision)
    replace(parts, stop=lambda rank, done: done == 4).play()
    (resumed, _, later), _ = parts.play()
    assert [line.loss_scale for line in later] == [line.loss_scale for line in lines[resumed.step :]]
    assert parts.journal() == SmallRun(tmp_path / "whole").journal()
    assert compare_checkpoints(at(parts.folder, STEPS), at(tmp_path / "whole", STEPS)) == []


def test_a_checkpoint_names_its_plan_and_its_data(tmp_path):
    small_run = SmallRun(tmp_path, ranks=1)

    def rank(world: World) -> Path:
        executor = executor_of(small_run.analyzed, small_run.plan, world)
        place = save_run_checkpoint(executor, small_run.plan, world, "d" * 64)
        executor.close()
        return place

    (place,) = run_on_threads(rank, small_run.plan.mesh)
    meta = json.loads((place / "manifest.json").read_text())["meta"]
    assert (meta["plan_hash"], meta["data"], meta["torch"]) == (
        small_run.plan.hash,
        "d" * 64,
        torch.__version__,
    )
    assert meta["plan"]["job"]["optimizer"]["name"] == "adamw"


@pytest.mark.parametrize("valid", [0, 1])
def test_data_in_which_nothing_counts_ends_the_run_after_one_epoch_and_not_before(tmp_path: Path, valid: int):
    """Steps in which nothing counts are skipped and journalled; a single token in the whole data makes the
    loss defined.
    """
    small_run = SmallRun(tmp_path, ranks=3)
    labels = torch.full_like(token_samples()["labels"], IGNORE_INDEX)
    labels[:valid, 0] = 1
    data, plan = ExampleDataset({**token_samples(), "labels": labels}), small_run.plan

    def rank(world: World) -> TrainResult:
        executor = executor_of(ANALYZED, plan, world)
        try:
            return train_loop(
                executor, plan, open_local_batches(data, plan, world.rank), world, lambda: False
            )
        finally:
            executor.close()

    if valid:
        assert [ended.step for ended in run_on_threads(rank, plan.mesh)] == [STEPS] * 3
    else:
        with pytest.raises(
            PlanError, match=r"(?s)nothing counts in any of the 24 samples, all trained on up to step 2.*-100"
        ):
            run_on_threads(rank, plan.mesh)
    skipped = [line["skipped"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert (
        skipped == [True, True]
        if not valid
        else (sorted(set(skipped)) == [False, True] and len(skipped) == STEPS)
    )
