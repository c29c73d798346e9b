"""Checkpoint directories: which stay, which are removed, and what is left when a save stops at any system
call.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import BEST_CHECKPOINT
from meshwright.run.checkpoint.directories import best_step, mark_best
from meshwright.run.checkpoint.distributed_checkpoint import newest_valid, save_tensors
from tests.run.checkpoint.awkward_states import (
    META,
    alone,
    assert_holds,
    attempt,
    names,
    partial,
    saved,
    state,
)
from tests.run.checkpoint.failing_disk import REMOVALS, WRITES, Death, How, Machine

HEADER = BEST_CHECKPOINT.header


def test_only_the_newest_ones_stay_and_stopped_saves_go(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002.partial-0badcafe").mkdir()
    (tmp_path / "step-00000002.partial-0badcafe" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    saved(tmp_path, 10, keep=2)
    assert names(tmp_path) == ["notes", "step-00000002", "step-00000010"]


def test_damaged_ones_do_not_count_among_those_that_stay(tmp_path):
    saved(tmp_path, 1, 2, 3)
    next((tmp_path / "step-00000003").glob("*.safetensors")).write_bytes(b"short")
    saved(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_the_one_just_written_stays_beside_newer_ones(tmp_path):
    saved(tmp_path, 7, 8)
    saved(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005", "step-00000008"]


def test_the_best_one_stays_until_another_is_the_best(tmp_path):
    saved(tmp_path, 1, 2)
    mark_best(tmp_path, 1, 0.5)
    saved(tmp_path, 3, 4, keep=1)
    assert names(tmp_path) == ["best.json", "step-00000001", "step-00000004"]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        **HEADER,
        "step": 1,
        "folder": "step-00000001",
        "loss": 0.5,
    }
    mark_best(tmp_path, 4, 0.25)
    saved(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["best.json", "step-00000004", "step-00000005"]


def test_a_best_one_that_is_not_there_is_not_named(tmp_path):
    saved(tmp_path, 1)
    mark_best(tmp_path, 2, 0.5)
    assert best_step(tmp_path) == 0
    mark_best(tmp_path, 1, 0.5)
    mark_best(tmp_path, 2, 0.25)
    assert best_step(tmp_path) == 1
    shutil.rmtree(tmp_path / "step-00000001")
    mark_best(tmp_path, 0, None)
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", *(json.dumps({**HEADER, "step": step}) for step in ("1", -1))])
def test_a_damaged_word_about_the_best_is_none(tmp_path, text):
    saved(tmp_path, 1)
    (tmp_path / "best.json").write_text(text)
    assert best_step(tmp_path) == 0
    saved(tmp_path, 2, keep=1)
    assert "step-00000001" not in names(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"step": 1}', json.dumps({**HEADER, "version": 2, "step": 1})])
def test_a_file_about_the_best_of_another_version_is_refused_with_the_repair(tmp_path, text):
    (tmp_path / "best.json").write_text(text)
    with pytest.raises(PlanError, match=r"best.json: its version is 2|names no format(?s:.*)remove the file"):
        best_step(tmp_path)


def test_a_word_about_the_best_that_cannot_be_written_is_a_line_in_the_log(tmp_path, caplog):
    saved(tmp_path, 1)
    (tmp_path / "best.part").mkdir()
    with caplog.at_level(logging.WARNING):
        mark_best(tmp_path, 1, 0.5)
    assert "the best checkpoint is that of step 1, but" in caplog.text


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege there")
def test_a_link_is_neither_followed_nor_removed(tmp_path):
    elsewhere = saved(tmp_path / "elsewhere", 9)[0]
    folder = tmp_path / "run"
    saved(folder, 1)
    (folder / "step-00000009").symlink_to(elsewhere)
    path, _, rejected = newest_valid(folder)
    assert path == folder / "step-00000001"
    assert "a link to one; links are not followed" in rejected[0][1]
    saved(folder, 2, keep=1)
    assert names(folder) == ["step-00000002", "step-00000009"]
    assert_holds(elsewhere, state(9))


def test_what_cannot_be_removed_is_said_and_the_new_one_is_good(tmp_path, monkeypatch, caplog):
    saved(tmp_path, 1)

    def denied(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("meshwright.run.checkpoint.directories.shutil.rmtree", denied)
    with caplog.at_level(logging.WARNING):
        assert_holds(saved(tmp_path, 2, keep=1)[0], state(2))
    assert re.search(r"step-00000001' could not be removed: .*Permission denied", caplog.text)


def test_a_disk_that_is_full_at_any_write_is_an_error_and_leaves_the_old_ones(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, WRITES)
    at, reached = 0, True
    while reached:
        folder = tmp_path / str(at)
        saved(folder, 1, 2)
        machine.arm(at, "full")
        error = attempt(folder, 3, alone())
        reached = machine.disarm()
        assert (error is not None) == reached
        if error is not None:
            assert isinstance(error.__cause__, OSError), at
            assert "No space left on device" in str(error)
            assert "free space" in error.diagnostics[0].fix
        assert partial(folder) == []
        path, _, _ = newest_valid(folder)
        assert_holds(path, state(int(path.name[5:])))
        assert_holds(folder / "step-00000002", state(2))
        assert_holds(saved(folder, 3, keep=2)[0], state(3))
        at += 1
    assert at > 15


@pytest.mark.parametrize("how", ["dead before", "dead after", "torn"])
@pytest.mark.parametrize("damaged", [False, True], ids=["fresh", "over a damaged one"])
def test_a_process_that_dies_at_any_call_leaves_a_good_checkpoint(
    how: How, damaged: bool, tmp_path, monkeypatch
):
    machine = Machine(monkeypatch, (*WRITES, *REMOVALS))
    at, reached, steps = 0, True, set()
    while reached:
        folder = tmp_path / str(at)
        saved(folder, 1, 2, *([3] if damaged else []))
        if damaged:
            (folder / "step-00000003" / "rank-00000.safetensors").write_bytes(b"half")
        machine.arm(at, how)
        try:
            save_tensors(folder, 3, state(3), META, alone(), keep=2)
        except Death:
            died = True
        else:
            died = False
        reached = machine.disarm()
        assert died == reached
        path, manifest, _ = newest_valid(folder)
        steps.add(manifest.step)
        assert_holds(path, state(manifest.step))
        saved(folder, 3)
        saved(folder, 4, keep=2)
        assert names(folder) == ["step-00000003", "step-00000004"]
        assert_holds(folder / "step-00000003", state(3))
        at += 1
    assert steps == {2, 3}
    assert at > 20


def test_all_is_on_disk_before_the_rename_and_nothing_goes_before_that_is(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    acts: list[str] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def watched_fsync(descriptor: int) -> None:
        files = {path.stat().st_ino: path.name for path in tmp_path.rglob("*")} | {
            tmp_path.stat().st_ino: "the folder above"
        }
        acts.append(f"fsync {files[os.fstat(descriptor).st_ino].split('.partial-')[0]}")
        fsync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        acts.append(f"rename to {target.name.split('-')[1]}")
        rename(source, target)

    def watched_rmtree(path: Path) -> None:
        acts.append(f"delete {path.name.split('.')[0]}")
        rmtree(path)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    monkeypatch.setattr(shutil, "rmtree", watched_rmtree)
    saved(tmp_path, 2, keep=1)
    assert acts == [
        "fsync rank-00000.safetensors",
        "fsync manifest.json",
        "fsync step-00000002",
        "rename to 00000002",
        "fsync the folder above",
        "rename to 00000001.partial",
        "delete step-00000001",
    ]
