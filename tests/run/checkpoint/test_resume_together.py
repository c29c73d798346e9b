"""Ranks that resume together: each checkpoint file is verified once, and all ranks take the same
checkpoint.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from meshwright.api import parallelize
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.manifest import MANIFEST_FILE, Json, seal_json
from meshwright.run.checkpoint.resume import ResumeResult, newest_usable_step, resume
from meshwright.testing.ranks import run_on_threads
from tests.run.checkpoint.awkward_states import names
from tests.run.checkpoint.test_distributed_verification import FILES, flip, read_since
from tests.run.training.small_run import ANALYZED, DATA, SmallRun
from tests.tiny_model import executor_of

RUN = {"save_every": 4, "keep": 9, "keep_best": False}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three ranks, with checkpoints of steps 4, 8 and 12."""
    small_run = SmallRun(tmp_path_factory.mktemp("ended"), ranks=3, run=RUN)
    small_run.play()
    assert small_run.kept() == [4, 8, 12]
    assert sorted(path.name for path in small_run.at(12).glob("*.safetensors")) == FILES
    return small_run.folder


@pytest.fixture
def small_run(ended: Path, tmp_path: Path) -> SmallRun:
    """That run, to be spoilt."""
    shutil.copytree(ended, tmp_path / "run")
    return SmallRun(tmp_path / "run", ranks=3, run=RUN)


def go_on(small_run: SmallRun, step: int | None = None) -> list[ResumeResult | str]:
    """Returns what resuming gives every rank, or its error."""

    def rank(world: World) -> ResumeResult | str:
        executor = executor_of(ANALYZED, small_run.plan, world)
        try:
            return resume(executor, small_run.plan, world, DATA.digest, step)
        except PlanError as error:
            return str(error)
        finally:
            executor.close()

    return run_on_threads(rank, small_run.plan.mesh)


def test_a_run_that_goes_on_reads_each_file_of_its_checkpoint_for_its_sum_once(
    small_run: SmallRun, monkeypatch
):
    read = read_since(monkeypatch)
    for found in go_on(small_run):
        assert isinstance(found, ResumeResult)
        assert (found.step, found.notes) == (12, ("resumed from step 12",))
    assert Counter(path for _, path in read) == {small_run.at(12) / file: 1 for file in FILES}
    assert {rank for rank, _ in read} == {"rank 0", "rank 1", "rank 2"}


def test_an_engine_that_loads_does_likewise(small_run: SmallRun, monkeypatch):
    read = read_since(monkeypatch)

    def rank(world: World) -> int:
        with parallelize(ANALYZED, small_run.plan, world=world) as engine:
            return engine.load(small_run.at(8))

    assert run_on_threads(rank, small_run.plan.mesh) == [8] * 3
    assert Counter(path for _, path in read) == {small_run.at(8) / file: 1 for file in FILES}


@pytest.mark.parametrize("file", [*FILES, MANIFEST_FILE])
def test_all_ranks_pass_over_a_checkpoint_that_one_of_them_found_damaged(file: str, small_run: SmallRun):
    flip(small_run.at(12) / file)
    told = go_on(small_run)
    assert told == [told[0]] * 3
    assert isinstance(told[0], ResumeResult)
    assert told[0].step == 8
    notes = told[0].notes
    assert (notes[0], notes[2]) == ("resumed from step 8", "step-00000008 is the newest valid checkpoint")
    assert notes[1].startswith(
        f"skipped step-00000012: {file}: " if file != MANIFEST_FILE else "skipped step-00000012: "
    )


def edit_meta(path: Path, **values: Json) -> None:
    """Replaces values of `meta` in the manifest of the checkpoint at `path`, and seals it anew."""
    body = json.loads((path / MANIFEST_FILE).read_text())
    body["meta"] |= values
    (path / MANIFEST_FILE).write_text(seal_json(body))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("plan", 5, "meta.plan: given is 5; needed is a table of keys"),
        ("plan", {"strategies": 5}, "meta.plan.strategies: needed is a list of tables with a name"),
        ("plan", {"strategies": [{"name": []}]}, "meta.plan.strategies: needed is a list of tables"),
        ("data", None, "meta.data: given is null; needed is a string"),
        ("eval_history", [], "meta.eval_history: given is []; needed is a table of keys"),
        (
            "reduction_transports",
            {"dp_replicate": 1},
            "meta.reduction_transports.dp_replicate: given is 1; needed is a string",
        ),
    ],
)
def test_a_checkpoint_with_valid_checksums_and_a_meta_of_wrong_types_is_passed_over(
    key: str, value: Json, reason: str, small_run: SmallRun
):
    edit_meta(small_run.at(12), **{key: value})
    told = go_on(small_run)
    assert told == [told[0]] * 3
    assert isinstance(told[0], ResumeResult)
    assert told[0].step == 8
    assert told[0].notes[1].startswith(f"skipped step-00000012: {MANIFEST_FILE}: {reason}")


def test_a_run_whose_only_checkpoint_has_a_meta_of_wrong_types_is_refused_before_ranks_start(
    small_run: SmallRun,
):
    shutil.rmtree(small_run.at(4))
    shutil.rmtree(small_run.at(8))
    assert newest_usable_step(small_run.plan) == 12
    edit_meta(small_run.at(12), plan="text")
    with pytest.raises(PlanError, match=r"meta\.plan: given is .text.; needed is a table of keys"):
        newest_usable_step(small_run.plan)


def test_when_every_checkpoint_is_damaged_all_ranks_say_so(small_run: SmallRun):
    for step, file in zip((4, 8, 12), FILES, strict=True):
        flip(small_run.at(step) / file)
    told = go_on(small_run)
    assert told == [told[0]] * 3
    assert "none of the 3 checkpoints here can be used" in str(told[0])
    assert all(f"{file}: bit-flipped" in str(told[0]) for file in FILES)


@pytest.mark.parametrize("step", [5, 8, 12])
def test_a_step_that_is_asked_for_and_missing_damaged_or_misnamed_is_refused_by_all(
    step: int, small_run: SmallRun
):
    flip(small_run.at(8) / FILES[1])
    shutil.rmtree(small_run.at(12))
    small_run.at(4).rename(small_run.at(12))
    told = go_on(small_run, step)
    assert told == [told[0]] * 3
    words = {
        5: "there is no checkpoint of step 5",
        8: f"{FILES[1]}: bit-flipped",
        12: "its manifest is of step 4",
    }
    assert words[step] in str(told[0])


def test_a_file_about_the_best_of_another_version_is_refused_by_all(small_run: SmallRun):
    best = small_run.at(4).parent / "best.json"
    best.write_text('{"format": "meshwright best checkpoint", "version": 99, "step": 4}')
    told = go_on(small_run)
    assert told == [told[0]] * 3
    assert "best.json" in str(told[0])
    assert "99" in str(told[0])
    assert "rank" not in str(told[0])


def test_a_folder_with_nothing_in_it_starts_from_step_0_on_all_ranks(tmp_path: Path):
    small_run = SmallRun(tmp_path, ranks=3)
    assert go_on(small_run) == [ResumeResult(0, ("starting from step 0",))] * 3
    assert names(tmp_path) == []
