"""Kills of runs with states on disk: the plans of each kind, and what a result needs to hold."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery import disk_kills
from benchmarks.recovery.disk_kills import KINDS, NUM_KILLS, kills, result


def row(*, hits: int, failures: tuple[str, ...] = ()) -> dict[str, Any]:
    attempts = [{"hit": number < hits, "victim": "rank", "moment": "save"} for number in range(hits + 1)]
    return {"trial": 0, "kind": "same plan", "attempts": attempts, "failures": list(failures)}


def test_every_kind_rests_on_disk_at_first_and_its_undisturbed_run_never():
    assert {kind.name for kind in KINDS} == {"same plan", "memory alone", "other ranks", "other shards"}
    for kind, plain in KINDS.items():
        assert "disk_offload" in kind.plans[0][-1]
        assert "disk_offload" not in plain[-1]


def test_a_result_holds_only_with_all_kills_and_no_failure():
    good = [row(hits=2)] * (NUM_KILLS // 2)
    assert result(good).holds
    assert not result(good[1:]).holds
    assert not result([*good, row(hits=0, failures=("attempt 1: exit code 3",))]).holds
    assert len(kills(good[0])) == 2


def test_rows_that_are_stored_do_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known = {0: row(hits=1), 1: row(hits=2)}
    monkeypatch.setattr(disk_kills, "read_rows", lambda folder: known)
    monkeypatch.setattr(disk_kills, "Trial", None)  # none is started
    assert list(disk_kills.run_trials(3, tmp_path)) == [known[0], known[1]]
