"""Training with trackers and logs: terminal output, files in the run folder, and trackers that fail."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.commands import verify
from meshwright.run.launch import host_memory_check
from meshwright.run.measure.profile_files import write_profile
from meshwright.run.telemetry.metrics_log import read_metrics
from tests.command_line import become_the_only_rank, forget_ranks, invoke, lay_out, metrics, refuse_to_start
from tests.commands.test_predict import profile


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    forget_ranks(monkeypatch)
    become_the_only_rank(monkeypatch)
    refuse_to_start(monkeypatch)
    return lay_out(tmp_path / "job", train={"steps": 4})


def alone(config: Path, *words: object) -> list[object]:
    return ["train", config, "--mesh.dp_replicate", 1, *words]


def broken(name: str) -> ModuleType:
    """A package whose start fails, with a text over several lines."""

    def init(**settings: object) -> None:
        raise ConnectionError("api.example.org:\n  no route to host")

    module = ModuleType(name)
    vars(module).update(init=init, Settings=lambda **settings: None)
    return module


def test_a_tracker_that_raises_is_reported_once_and_the_run_continues(config, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", broken("wandb"))
    monkeypatch.setitem(sys.modules, "trackio", None)
    code, out, _ = invoke(capsys, *alone(config, "--run.trackers", '["wandb", "trackio"]'))
    assert code == 0
    assert len(metrics(config.parent / "run")) == 4
    assert out.count("the tracker wandb is off: ConnectionError: api.example.org: no route to host") == 1
    assert "pip install 'meshwright[trackio]'" in out
    assert out.count("warning: ") == 2
    log = (config.parent / "run" / "logs" / "rank-0.log").read_text()
    assert "rank 0 WARNING meshwright.run.telemetry.trackers: the tracker wandb is off" in log


def test_a_tracker_that_nobody_knows_is_refused_with_the_nearest(config, capsys):
    code, out, err = invoke(capsys, *alone(config, "--run.trackers", '["tensorbord"]'))
    assert (code, out) == (2, "")
    assert "run.trackers: trackers contains 'tensorbord'; needed is 'tensorboard', 'wandb'" in err
    assert "did you mean 'tensorboard'?" in err


def test_lines_show_every_figure_under_its_name(config, capsys):
    _, out, _ = invoke(capsys, *alone(config))
    lines = [line.split() for line in out.splitlines()]
    assert ["step", "loss", "grad_norm", "lr", "memory", "tokens/s", "GFLOP/s", "ETA"] in lines
    assert [line[0] for line in lines if line and line[0].endswith("/4")] == ["1/4", "2/4", "3/4", "4/4"]


def test_the_folder_says_what_the_run_is_and_what_it_used(config, capsys):
    invoke(capsys, *alone(config, "--run.trace_steps", 1))
    run = config.parent / "run"
    assert json.loads((run / "run_info.json").read_text())["world"] == 1
    assert json.loads((run / "ranks" / "rank-0.json").read_text())["steps"] == 4
    assert json.loads((run / "trace" / "rank-0.json").read_text())["traceEvents"]
    code, out, _ = invoke(capsys, "report", run)
    assert code == 0
    assert "report written to" in out


WARNING = """
import logging
import os

from model import Bytes


def build():
    if os.environ.get("RANK") == "1":
        logging.getLogger("disk").warning("rank one has a slow disk")
    return Bytes()
"""


def test_every_rank_has_a_log_and_a_warning_of_another_rank_reaches_the_user(tmp_path, forks, monkeypatch):
    forget_ranks(monkeypatch)
    config = lay_out(tmp_path / "job", train={"steps": 2}, model={"source": "warns.py:build"})
    (config.parent / "warns.py").write_text(WARNING)
    code, out, err = forks("train", config)
    assert code == 0, err
    log = config.parent / "run" / "logs" / "rank-1.log"
    assert "rank one has a slow disk" in log.read_text()
    assert out.count("rank one has a slow disk") == 1
    assert "rank 1 warned: rank one has a slow disk" in out
    for rank in (0, 1):
        text = (config.parent / "run" / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} INFO meshwright.commands.train: " in text


def test_what_was_predicted_is_kept_with_the_run_and_shown_beside_what_was_measured(config, capsys, tmp_path):
    write_profile(profile(), tmp_path / "device.toml")
    code, _, err = invoke(
        capsys, *alone(config, "--run.hardware", tmp_path / "device.toml", "--run.trace_steps", 1)
    )
    assert code == 0, err
    (folder,) = (path.parent for path in tmp_path.rglob("run_info.json"))
    predicted = json.loads((folder / "run_info.json").read_text())["prediction"]
    assert predicted["step_s"] > 0
    _, out, _ = invoke(capsys, "report", folder)
    first, step, *others = out.splitlines()
    assert first.split() == [folder.name, "predicted", "measured", "error"]
    assert step.startswith("a step")
    assert any(line.startswith("parameters") and line.split()[-2:] == ["+0.0", "%"] for line in others)
    assert "Predicted and measured" in (folder / "report.html").read_text()


@pytest.fixture
def small_host(monkeypatch) -> None:
    """8 KiB of host memory are free."""
    nbytes = lambda: (8 << 10, 1 << 30)  # noqa: E731
    monkeypatch.setattr(host_memory_check, "free_and_total_host_nbytes", nbytes)
    monkeypatch.setattr(verify, "free_and_total_host_nbytes", nbytes)


@pytest.mark.usefixtures("small_host")
def test_a_host_that_is_too_small_is_told_before_a_rank_starts(tmp_path, capsys, monkeypatch):
    forget_ranks(monkeypatch)
    refuse_to_start(monkeypatch)
    config = lay_out(tmp_path / "job")
    code, out, err = invoke(capsys, "train", config)
    assert (code, out) == (2, "")
    assert re.search(r"2 ranks of this host need [\d.]+ MiB of its memory, and 8 KiB are free", err)
    assert not (config.parent / "run").exists()
    for on in ("threads", "processes"):
        code, _, err = invoke(capsys, "verify", config, "--on", on)
        assert code == 2
        assert "--shrink compares a scaled-down model" in err


@pytest.mark.usefixtures("small_host")
def test_a_rank_of_another_launcher_looks_at_its_own_host(config, capsys):
    code, _, err = invoke(capsys, *alone(config))
    assert code == 2
    assert "rank 0 of this host needs" in err


def test_a_checkpoint_is_evaluated_and_nothing_else_of_the_run_changes(config, capsys):
    invoke(capsys, *alone(config, "--run.save_every", 2))
    run = config.parent / "run"

    def files() -> dict[Path, bytes]:
        kept = (path for path in run.rglob("*") if path.is_file() and path.suffix not in (".log", ".jsonl"))
        return {path: path.read_bytes() for path in kept if "attempts" not in path.parts}

    before = files()
    # under this plan other samples are trained on: a run that went back to step 2 would retire step 4
    evaluate = ["evaluate", config, "--mesh.dp_replicate", 1, "--evaluate.hold_out", 4]
    for words, step in ((["--from-step", 2], 2), ([], 4)):
        code, out, _ = invoke(capsys, *evaluate, *words)
        assert code == 0
        assert f"step {step}: evaluation loss" in out
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line.get("kind") == "evaluation"]
    assert [line["step"] for line in lines] == [2, 4]
    assert files() == before


def test_what_cannot_be_evaluated_is_refused(config, capsys):
    words = ["evaluate", config, "--mesh.dp_replicate", 1]
    code, _, err = invoke(capsys, *words)
    assert code == 2
    assert "evaluate: nothing to evaluate" in err
    code, _, err = invoke(capsys, *words, "--evaluate.hold_out", 4)
    assert code == 2
    assert "evaluate: there is no checkpoint in" in err
    code, _, err = invoke(capsys, *words, "--evaluate.tasks", '["hellaswag"]')
    assert code == 2
    assert "evaluate.tasks: tasks are texts, and the job has no tokenizer of transformers" in err
