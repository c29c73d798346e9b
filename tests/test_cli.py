"""The command line end to end: real processes that are killed, stopped and restarted, and their output."""

import json
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints
from tests.command_line import ENV, STEPS, Command, Said, checkpoint, command, lay_out, metrics, steps_kept


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    return lay_out(tmp_path_factory.mktemp("cli"))


@pytest.fixture(scope="module")
def left_alone(config) -> tuple[Path, str]:
    """The run of two ranks that nobody disturbed, and what it printed."""
    code, out, err = command("train", config)
    assert (code, err) == (0, "")
    return config.parent / "run", out


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    yield started
    for each in started:
        each.close()


def test_help_names_the_commands_and_needs_no_torch():
    words = (
        "import sys, meshwright.cli as c; c.app(['--help'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", words], env=ENV, capture_output=True, text=True, check=True
    ).stdout
    assert all(verb in out for verb in ("plan", "verify", "train", "--train.steps 100"))
    assert out.endswith("False\n")


def test_a_run_says_what_it_did_and_where_everything_lies(left_alone):
    run, out = left_alone
    first, data, second, *_ = out.splitlines()
    assert first.startswith("plan ")
    assert f": {STEPS} steps of 12 samples on dp_replicate 2, into {run}" in first
    assert data.startswith("data  tokenizer bytes, 465 samples, ")
    assert second == "starting from step 0"
    assert f"done: step {STEPS}, loss " in out
    for word, path in {
        "plan": "plan.toml",
        "metrics": "metrics.jsonl",
        "checkpoint": f"checkpoints/step-{STEPS:08d}",
    }.items():
        assert f"{word:<12}{run / path}\n" in out
        assert (run / path).exists()
    assert sorted(metrics(run)) == list(range(1, STEPS + 1))
    assert steps_kept(run) == ["step-00000080", "step-00000090", "step-00000100"]
    assert "\x1b" not in out
    assert max(map(len, out.splitlines()[2:-3])) <= 80


SHARED = "ranks of this host sum through shared memory"


@pytest.fixture(scope="module")
def failed(config, forks) -> tuple[Path, Said]:
    """The run of two ranks without shared memory, of which one raises in its third step; how the command
    ended.
    """
    run = config.parent / "failed"
    words = (
        "--run.folder",
        run,
        "--run.shared_memory",
        "false",
        "--model.source",
        f"{config.parent / 'model.py'}:fails",
    )
    return run, forks("train", config, *words)


def test_the_log_says_whether_memory_was_shared_and_a_key_turns_it_off(left_alone, failed):
    shared, alone = ((run / "logs" / "rank-1.log").read_text() for run in (left_alone[0], failed[0]))
    assert SHARED in shared
    assert SHARED not in alone
    assert "rank 1 INFO" in alone


@dataclass
class Trial:
    """A run that is disturbed again and again, always with the same command."""

    config: Path
    run: Path
    commands: list[Command]

    def begin(self) -> Command:
        self.commands.append(Command("train", self.config, "--run.folder", self.run))
        return self.commands[-1]

    def at_step(self, step: int) -> Command:
        """A process that has just played `step`, a multiple of 5 (of 100 steps, every 5th is printed)."""
        running = self.begin()
        running.until(lambda: f"{step:>3}/{STEPS} " in running.printed())
        return running


def test_a_run_that_is_killed_and_stopped_ends_like_one_left_alone(
    config, left_alone, commands, forks, tmp_path
):
    run, chance = tmp_path / "run", random.Random(3)
    trial = Trial(config, run, commands)

    one = trial.at_step(chance.randrange(5, 30, 5))
    one.ranks()[1].kill()
    code, _, err = one.output()
    assert code == 1
    assert "rank 1 was killed by signal 9" in err
    assert "Traceback" not in err, "the other rank only lost its peer"

    stopped = trial.at_step(chance.randrange(45, 65, 5))
    stopped.process.send_signal(signal.SIGTERM)
    code, out, err = stopped.output()
    assert (code, err) == (143, "")
    assert "the same command resumes from here" in out
    step = max(metrics(run))
    assert f"stopped at step {step}, loss " in out
    assert checkpoint(run, step).is_dir()

    code, out, err = forks("train", config, "--run.folder", run)
    assert (code, err) == (0, "")
    assert f"\nresumed from step {step}\n" in out
    assert metrics(run) == metrics(left_alone[0])
    assert compare_checkpoints(checkpoint(run, STEPS), checkpoint(left_alone[0], STEPS)) == []
    assert not list((run / "checkpoints").glob("*.partial-*"))


def test_one_process_and_three_train_what_two_do(config, left_alone, forks, tmp_path):
    theirs = metrics(left_alone[0])
    code, _, err = forks("train", config, "--run.folder", tmp_path / "one", "--mesh.dp_replicate", 1)
    assert (code, err) == (0, "")
    mine = metrics(tmp_path / "one")
    assert [mine[step][2] for step in mine] == [theirs[step][2] for step in mine]
    assert all(mine[step][0] == pytest.approx(theirs[step][0], abs=1e-5) for step in mine)

    shutil.copytree(checkpoint(left_alone[0], 80), checkpoint(tmp_path / "three", 80))
    code, out, err = forks(
        "train", config, "--run.folder", tmp_path / "three", "--mesh.dp_replicate", -1, "--world", 3
    )
    assert (code, err) == (0, "")
    assert (
        "resumed from step 80\nthe plan changed since that checkpoint: mesh.dp_replicate was 2, is 3" in out
    )
    mine = metrics(tmp_path / "three")
    assert sorted(mine) == list(range(81, STEPS + 1))
    assert all(mine[step][0] == pytest.approx(theirs[step][0], abs=1e-5) for step in mine)


def test_under_torchrun_a_rank_gives_the_same_bits(config, left_alone, tmp_path):
    run = tmp_path / "run"
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshwright")
    code, out, err = command("train", config, "--run.folder", run, launcher=words)
    assert code == 0, err
    assert metrics(run) == metrics(left_alone[0])
    assert compare_checkpoints(checkpoint(run, STEPS), checkpoint(left_alone[0], STEPS)) == []
    assert out.count("starting from step 0") == 1
    assert (run / "plan.toml").exists()


def test_the_traceback_of_the_rank_that_raised_is_shown_once(failed):
    code, out, err = failed[1]
    assert code == 1, (out, err)
    assert err.startswith("rank 1 failed at step 3 (training)\nTraceback")
    assert (out + err).count("Traceback") == 1
    assert err.count("ValueError: planted in rank 1") == 1
    assert "in act" in err


def test_a_full_disk_is_said_without_a_traceback_and_the_last_good_checkpoint_stays(
    config, left_alone, forks, tmp_path
):
    run = tmp_path / "run"
    code, _, err = forks(
        "train", config, "--run.folder", run, "--model.source", f"{config.parent / 'model.py'}:fills"
    )
    assert code == 2, err
    assert err.startswith(
        "error checkpoint: step 20 was not saved: writing failed on rank 0 (File too large)"
    )
    assert "repair: " in err
    assert "earlier checkpoints are untouched" in err
    assert "Traceback" not in err
    assert steps_kept(run) == ["step-00000010"]
    assert metrics(run) == {step: line for step, line in metrics(left_alone[0]).items() if step <= 20}


def test_processes_verify_a_plan_and_name_it_in_a_file(config, left_alone, forks, tmp_path):
    code, out, err = forks(
        "verify", config, "--on", "processes", "--steps", 2, "--json", tmp_path / "verdict.json"
    )
    assert (code, err) == (0, "")
    assert "dp_replicate 2 equals one device after 2 steps of build, on processes" in out
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["passed"], verdict["rank_backend"], verdict["num_steps"]) == (True, "processes", 2)
    assert f'plan_hash = "{verdict["plan"]}"' in (left_alone[0] / "plan.toml").read_text()


def test_ctrl_c_before_the_ranks_start_ends_with_130(config, commands, tmp_path):
    run = tmp_path / "run"
    commands.append(Command("train", config, "--run.folder", run))
    early = commands[-1]
    maps = Path(f"/proc/{early.process.pid}/maps")
    early.until(lambda: "libtorch" in maps.read_text())
    early.process.send_signal(signal.SIGINT)
    code, _, err = early.output()
    assert code == 130
    assert "Traceback" not in err
    assert not (run / "metrics.jsonl").exists()
