"""Five trials of the matrix, of every kind, and the faults that a trial must notice."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import meshwright
from benchmarks.recovery.kill_trial import (
    STEPS,
    Kind,
    Trial,
    differing_tensors,
    is_leftover,
    metrics_equal,
    still_running,
)
from benchmarks.recovery.resume_matrix import KINDS, TRIALS, kind_of
from meshwright.comm.backends.threads import single_rank_world
from meshwright.plan.sharding.mesh import AXES
from meshwright.run.checkpoint.directories import step_folder
from meshwright.run.checkpoint.distributed_checkpoint import save_tensors

ROOT = Path(meshwright.__file__).parents[2]


@pytest.mark.timeout(400)
def test_five_kill_resume_trials_of_every_kind_are_exact_and_leave_nothing(tmp_path: Path):
    options = [
        "--trials",
        "5",
        "--seed",
        "489",
        "--only-forks",
        "--folder",
        str(tmp_path),
        "--results",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "benchmarks.recovery.resume_matrix", *options]
    done = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts["failures"] == []
    assert sum(counts["kinds"].values()) == 5
    assert set(counts["kinds"]) == {kind.name for kind in KINDS}
    assert sum(counts["victims"].values()) >= 5, "most attempts except the last are killed"
    assert not list(tmp_path.glob("trial-*")), "a trial without failures leaves no folder"
    assert not (tmp_path / "resume_matrix.json").exists(), "only a complete matrix is a result"


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """A trial whose run is a copy of the undisturbed one, not judged yet."""
    run = tmp_path / "undisturbed" / "run"
    group = single_rank_world(torch.device("cpu")).group(AXES)
    lines = []
    for step in range(1, STEPS + 1):
        tensors = {"model/w": torch.arange(4.0) / step, "optimizer/exp_avg/w": torch.full((4,), step / 3)}
        save_tensors(run / "checkpoints", step, tensors, {}, group, keep=STEPS)
        lines.append(
            json.dumps({"step": step, "loss": 1 / step, "grad_norm": 3 / step, "lr": 0.1, "tokens": 192})
            + "\n"
        )
    (run / "metrics.jsonl").write_text("".join(lines))
    shutil.copytree(run, tmp_path / "trial" / "run")
    (tmp_path / "trial" / "tmp").mkdir()
    return Trial(0, Kind("two", (), (2,)), Path("config.toml"), run, tmp_path / "trial", seed=0, cold=False)


def failures_of(trial: Trial) -> list[str]:
    trial.check_published()
    trial.check_end()
    return trial.row.failures


def test_a_run_that_equals_the_undisturbed_one_has_no_failures(trial: Trial):
    assert failures_of(trial) == []


def test_a_checkpoint_of_another_step_under_a_valid_name_is_noticed(trial: Trial):
    shutil.rmtree(step_folder(trial.checkpoints, 8))
    shutil.copytree(step_folder(trial.checkpoints, 10), step_folder(trial.checkpoints, 8))
    assert any("the checkpoint of step 8 " in failure for failure in failures_of(trial))


def test_a_damaged_checkpoint_is_noticed(trial: Trial):
    file = next(step_folder(trial.checkpoints, 12).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert any("the checkpoint of step 12 " in failure for failure in failures_of(trial))


def test_a_step_that_differs_by_one_bit_or_is_missing_is_noticed(trial: Trial):
    path = trial.run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[4]["loss"] += 2.0**-50
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failures_of(trial) == ["attempt 0: the metrics of steps 5"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))
    assert any(f"the metrics of steps 5, {STEPS}" in failure for failure in failures_of(trial))


def test_the_norm_alone_may_have_a_tolerance(trial: Trial):
    trial.kind = replace(trial.kind, norm_tolerance=1e-6)
    path = trial.run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["grad_norm"] *= 1 + 1e-7
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failures_of(trial) == []
    lines[4]["loss"] += 2.0**-50
    lines[5]["grad_norm"] *= 1 + 1e-5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert failures_of(trial) == ["attempt 0: the metrics of steps 5, 6"]


@pytest.mark.parametrize(
    "name", ["tmp/meshwright-x", "run/checkpoints/step-00000040.partial-0a", "run/.plan.toml.1.part"]
)
def test_leftover_files_are_noticed(trial: Trial, name: str):
    (trial.folder / name).mkdir()
    assert failures_of(trial) == [f"attempt 0: left behind: {name}"]


def test_a_leftover_process_is_noticed_and_killed(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=tmp_path, stdin=subprocess.PIPE) as process:
        left = still_running(tmp_path, 0.0)
        assert len(left) == 1
        assert str(process.pid) in left[0]
        assert process.wait() == -9
    assert still_running(tmp_path, 0.0) == []


def test_values_are_compared_to_the_last_bit_or_within_rounding():
    assert metrics_equal((1.0, 2.0), (1.0, 2.0), None)
    assert not metrics_equal((1.0, 2.0), (1.0, 2.0 + 2**-50), None)
    assert metrics_equal((1.0, 2.0), (1.0, 2.0 + 2**-50), 1e-10)
    assert not metrics_equal((), (1.0,), 1e-10)
    truth = {"a": torch.tensor([1.0, 1e-9]), "b": torch.ones(2)}
    assert differing_tensors({"a": torch.tensor([1.0, 2e-9]), "b": torch.ones(2)}, truth, 1e-6) == []
    assert differing_tensors({"a": torch.tensor([1.0, 1e-5]), "c": torch.ones(2)}, truth, 1e-6) == [
        "b",
        "c",
        "a",
    ]
    assert differing_tensors({"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(2)}, truth, 1e-6) == [
        "a"
    ]


def test_the_choices_of_a_trial_follow_from_its_number_and_every_kind_occurs():
    assert [kind_of(n, 0).name for n in range(20)] == [kind_of(n, 0).name for n in range(20)]
    assert {kind_of(n, 0) for n in range(TRIALS)} == set(KINDS)
    assert is_leftover(Path("tmp/x"))
    assert not is_leftover(Path("run/checkpoints/step-00000040"))
