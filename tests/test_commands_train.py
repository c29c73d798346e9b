"""Training as the only rank, in this process: output when it resumes, goes back, or finds damage."""

import logging
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.commands import train
from meshwright.run.launch.cluster_env import RankEnv
from meshwright.run.launch.run_folder import claim_run_folder
from tests.command_line import (
    SEQUENCE,
    STEPS,
    Said,
    become_the_only_rank,
    checkpoint,
    forget_ranks,
    invoke,
    lay_out,
    metrics,
    refuse_to_start,
    steps_kept,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    forget_ranks(monkeypatch)
    become_the_only_rank(monkeypatch)
    return lay_out(tmp_path / "job")


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """Call the command in this process: exit code, stdout, stderr.

    It fails the test when it starts a rank.
    """
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


def alone(config: Path, *words: object) -> list[object]:
    return ["train", config, "--mesh.dp_replicate", 1, *words]


def test_a_finished_run_has_nothing_to_do(config, say):
    assert say(*alone(config, "--train.steps", 3))[0] == 0
    before = metrics(config.parent / "run")
    code, out, _ = say(*alone(config, "--train.steps", 3))
    assert code == 0
    assert "resumed from step 3\nnothing to do: step 3 is already reached (train.steps = 3)" in out
    assert metrics(config.parent / "run") == before


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(config, say, monkeypatch):
    run = config.parent / "run"
    with claim_run_folder(run):
        code, _, err = say(*alone(config, "--train.steps", 3))
        assert code == 2
        assert (
            f"error {run}: another run trains in this folder: attempt 1, process {os.getpid()} on host" in err
        )
        forget_ranks(monkeypatch)
        assert say("train", config) == (2, "", err)
        assert {path.name for path in run.iterdir()} <= {"attempts", "logs"}
    become_the_only_rank(monkeypatch)
    assert say(*alone(config, "--train.steps", 3))[0] == 0


def test_going_back_repeats_each_step_to_the_last_bit(config, say):
    say(*alone(config, "--train.steps", 30))
    code, out, _ = say(*alone(config, "--train.steps", 30, "--from-step", 10))
    assert code == 0
    assert "resumed from step 10" in out
    assert "20 steps were repeated from step 11: all are bit-identical" in out
    assert steps_kept(config.parent / "run") == ["step-00000010", "step-00000020", "step-00000030"]


def test_a_mixture_that_is_the_same_is_not_said_to_have_changed(tmp_path, config, say):
    mixture = [{"source": "text.txt", "weight": 3.0}, {"source": "text.txt", "weight": 1.0}]
    mixed = lay_out(tmp_path / "mixed", data={"source": "", "mixture": mixture})
    assert say(*alone(mixed, "--train.steps", 2))[0] == 0
    code, out, _ = say(*alone(mixed, "--train.steps", 3))
    assert code == 0
    assert "the plan changed since that checkpoint: job.train.steps was 2, is 3\n" in out
    assert ": 3 steps of 12 samples on one device, into " in out


def test_going_back_with_another_learning_rate_keeps_the_old_history_aside_and_says_so(config, say):
    run = config.parent / "run"
    say(*alone(config, "--train.steps", 30))
    before = metrics(run)
    code, out, _ = say(*alone(config, "--train.steps", 30, "--from-step", 10, "--optimizer.lr", 0.5))
    assert code == 0
    assert "later checkpoints were retired: step-00000020.aside-" in out
    assert "the plan changed since that checkpoint: job.optimizer.lr was 0.01, is 0.5" in out
    assert "step 12 was repeated and differs: loss" in out
    kept = [name for name in steps_kept(run) if ".aside-" not in name]
    assert kept == ["step-00000010", "step-00000020", "step-00000030"]
    assert len(steps_kept(run)) == 5
    after = metrics(run)
    assert after[10] == before[10]
    assert after[30] != before[30]
    assert "nothing to do" in say(*alone(config, "--train.steps", 30, "--optimizer.lr", 0.5))[1]


def test_damaged_checkpoints_are_passed_over_for_the_previous_good_one_and_that_is_said(config, say):
    run = config.parent / "run"
    say(*alone(config, "--train.steps", 40, "--run.keep", 9))
    good = metrics(run)
    shard = checkpoint(run, 40) / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    flipped = bytearray((checkpoint(run, 30) / "rank-00000.safetensors").read_bytes())
    flipped[-1] ^= 1
    (checkpoint(run, 30) / "rank-00000.safetensors").write_bytes(flipped)
    (checkpoint(run, 20) / "manifest.json").rename(run / "manifest.json")
    (run / "checkpoints" / "step-00000050.partial-1234abcd").mkdir()
    code, out, _ = say(*alone(config, "--train.steps", 40, "--run.keep", 9))
    assert code == 0
    first, second, third, *lines = out.splitlines()
    assert first.startswith("rank 0 of 1 (")
    assert second.endswith(f": 40 steps of 12 samples on one device, into {run}")
    assert third.startswith("data  tokenizer bytes, ")
    assert lines[0] == "resumed from step 10"
    assert [line.split(":")[0] for line in lines[1:5]] == [
        "skipped step-00000050.partial-1234abcd",
        "skipped step-00000040",
        "skipped step-00000030",
        "skipped step-00000020",
    ]
    assert lines[1].endswith(".partial-1234abcd: half-written: the save was stopped")
    assert "step-00000040: rank-00000.safetensors: truncated: " in lines[2]
    assert str(run) not in lines[2]
    assert lines[5] == "step-00000010 is the newest valid checkpoint"
    assert "30 steps were repeated from step 11: all are bit-identical" in out
    assert metrics(run) == good


def test_when_no_checkpoint_can_be_used_the_run_does_not_start_over(config, say):
    run = config.parent / "run"
    say(*alone(config, "--train.steps", 20))
    for step in (10, 20):
        (checkpoint(run, step) / "manifest.json").write_text("{}")
    code, out, err = say(*alone(config, "--train.steps", 20))
    assert (code, len(out.splitlines())) == (2, 1)  # who this rank is
    assert "none of the 2 checkpoints here can be used" in err
    assert "skipped step-00000010" in err
    assert "to start from step 0 here, move the folder away" in err
    assert steps_kept(run) == ["step-00000010", "step-00000020"]
    (run / "checkpoints").rename(run / "moved")
    code, out, _ = say(*alone(config, "--train.steps", 20))
    assert code == 0
    assert "starting from step 0" in out
    assert "20 steps were repeated from step 1: all are bit-identical" in out


def test_a_save_that_was_stopped_before_the_first_checkpoint_is_no_damage(config, say):
    partial = config.parent / "run" / "checkpoints" / "step-00000010.partial-1234abcd"
    partial.mkdir(parents=True)
    code, out, _ = say(*alone(config, "--train.steps", 10))
    assert code == 0
    assert "starting from step 0\nskipped step-00000010.partial-1234abcd" in out
    assert steps_kept(config.parent / "run") == ["step-00000010"]


def test_the_checkpoints_of_another_model_are_left_alone(config, say):
    say(*alone(config, "--train.steps", 10))
    code, _, err = say(*alone(config, "--train.steps", 10, "--model.source", config.parent / "llama.json"))
    assert code == 2
    assert "it is of another model: model/embed.weight: (256, 16) saved, None here" in err
    assert "train into another run.folder" in err
    assert steps_kept(config.parent / "run") == ["step-00000010"]
    assert say(*alone(config, "--train.steps", 20))[0] == 0


@pytest.mark.parametrize("name", ["../../rank-00000.safetensors", "/etc/passwd", "rank-00000.safetensors"])
def test_a_manifest_that_leads_elsewhere_is_refused(config, say, tmp_path, name):
    place = checkpoint(config.parent / "run", 10)
    say(*alone(config, "--train.steps", 10))
    shard = place / "rank-00000.safetensors"
    if name == shard.name:
        shard.rename(tmp_path / "outside")
        shard.symlink_to(tmp_path / "outside")
    else:
        (place / "manifest.json").write_text((place / "manifest.json").read_text().replace(shard.name, name))
    code, _, err = say(*alone(config, "--train.steps", 10))
    assert code == 2
    assert "skipped step-00000010" in err


def test_finite_data_ends_the_run_and_that_is_said(config, say):
    code, out, _ = say(*alone(config, "--data.epochs", 1))
    samples = -(-(len((config.parent / "text.txt").read_bytes()) - 1) // SEQUENCE)
    steps = -(-samples // 12)
    assert steps < STEPS, "the text must end before the steps do"
    assert code == 0
    assert f"done: step {steps}, loss" in out
    assert f"the data ended before step {STEPS}: 1 x {samples} samples last {steps} steps" in out
    assert (
        sum(line[2] for line in metrics(config.parent / "run").values())
        == len((config.parent / "text.txt").read_bytes()) - 1
    )


def test_data_that_end_in_the_middle_of_a_round_are_refused_before_a_rank_starts(config, say, monkeypatch):
    forget_ranks(monkeypatch)
    rounds = '[[strategies]]\nname = "diloco"\nsync_every = 4\n'
    config.write_text(f"{config.read_text()}\n{rounds}")
    words = ["train", config, "--mesh.dp_replicate", 1, "--mesh.outer", 2, "--data.epochs", 1]
    code, _, err = say(*words)
    samples = -(-(len((config.parent / "text.txt").read_bytes()) - 1) // SEQUENCE)
    steps = -(-samples // 12)
    assert steps % 4, "the text must end in the middle of a round"
    assert code == 2
    assert f"error train.steps: the data end after {steps} steps, in the middle of a round" in err
    assert f"set train.steps = {steps}" in err


def test_the_sample_of_a_trained_model_acts_on_no_terminal(config, say):
    code, out, _ = say(
        *alone(config, "--train.steps", 2, "--run.sample_tokens", 300, "--run.sample_prompt", "1 times")
    )
    assert code == 0
    assert "1 times" in out.split("a sample")[1]
    assert all(letter.isprintable() or letter == "\n" for letter in out)


def test_ranks_do_not_warn_again_of_what_their_launcher_has_checked(config, monkeypatch):
    logger, shown = logging.getLogger("meshwright.data"), Console(file=StringIO())
    monkeypatch.setattr(train, "resolve_request", lambda request: logger.warning("a link out of the folder"))
    rank = RankEnv(0, 2, 0, attempt_folder=config.parent)
    with train._record_failures(rank, config, [], shown):
        logger.warning("TF32 was on")
    assert shown.file.getvalue() == "warning: TF32 was on\n"
    log = (config.parent / "run" / "logs" / "rank-0.log").read_text()
    assert log.index("a link out of the folder") < log.index("TF32 was on")
