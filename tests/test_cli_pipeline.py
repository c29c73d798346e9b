"""The command line with a pipeline: training, verification, resuming on other meshes, kills, and reports."""

import shutil
from pathlib import Path

import pytest

from meshwright.run.checkpoint.distributed_checkpoint import compare_checkpoints
from tests.command_line import Command, Said, checkpoint, lay_out, metrics

STEPS = 40
BREAKS = '''

class Breaking(Block):
    """Raises in its fifth forward on values."""

    seen = 0

    def forward(self, x):
        self.seen += not isinstance(x, FakeTensor) and self.training
        if self.seen == 5:
            self.act()
        return super().forward(x)

    def act(self):
        raise ValueError("planted in a block")


class Stopping(Breaking):
    """Stops its process there."""

    def act(self):
        os.kill(os.getpid(), signal.SIGSTOP)


class Counting(Bytes):
    """Counts its forwards in a buffer between its blocks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def rest(self, x):
        for layer in self.layers:
            x = layer(x)
            self.seen += 1
        return x


def breaks():
    model = Bytes()
    model.layers[1] = Breaking()
    return model


def stops():
    model = Bytes()
    model.layers[1] = Stopping()
    return model


def counts():
    return Counting()
'''


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    tables = {"mesh": {"dp_replicate": 1, "pp": 3}, "train": {"steps": STEPS}, "micro_batch": 3}
    path = lay_out(
        tmp_path_factory.mktemp("parts"), strategies=[{"name": "pipeline", "schedule": "1f1b"}], **tables
    )
    with (path.parent / "model.py").open("a") as file:
        file.write(BREAKS)
    return path


@pytest.fixture(scope="module")
def left_alone(config, forks) -> tuple[Path, str]:
    """The run of three ranks that nobody disturbed, and what it printed."""
    code, out, err = forks("train", config, "--run.trace_steps", 2)
    assert (code, err) == (0, "")
    return config.parent / "run", out


def test_three_ranks_train_what_the_plan_says_and_tell_what_they_did(left_alone):
    run, out = left_alone
    assert f": {STEPS} steps of 12 samples on pp 3, into {run}" in out
    assert sorted(metrics(run)) == list(range(1, STEPS + 1))
    assert metrics(run)[1][2] == 12 * 16, "though the last rank alone takes the loss"


def test_processes_verify_it(config, forks, tmp_path):
    code, out, err = forks(
        "verify", config, "--on", "processes", "--steps", 2, "--json", tmp_path / "verdict.json"
    )
    assert (code, err) == (0, "")
    assert "pp 3 equals one device after 2 steps" in out


def test_a_run_resumes_with_other_stages_without_stages_and_with_replicas(
    config, left_alone, forks, tmp_path
):
    run, theirs = tmp_path / "run", metrics(left_alone[0])
    shutil.copytree(checkpoint(left_alone[0], 10 * (STEPS // 10 - 2)), checkpoint(run, STEPS - 20))
    copies = '[{name = "batch_split"}, {name = "ddp"}]'
    changes = (
        (
            "mesh.pp was 3, is 2, strategies.pipeline.schedule was 1f1b, is gpipe",
            25,
            ("--mesh.pp", 2, "--strategies.pipeline.schedule", "gpipe"),
        ),
        ("mesh.pp was 2, is 1, strategies.pipeline is gone", 30, ("--mesh.pp", 1, "--strategies", "[]")),
        ("mesh.pp was 1, is 3, strategies.pipeline is new", 35, ()),
        ("mesh.pp was 3, is 1", STEPS, ("--mesh.pp", 1, "--mesh.dp_replicate", 2, "--strategies", copies)),
    )
    for said, steps, words in changes:
        code, out, err = forks("train", config, "--run.folder", run, "--train.steps", steps, *words)
        assert (code, err) == (0, ""), said
        assert said in out
    mine = metrics(run)
    assert sorted(mine) == list(range(STEPS - 19, STEPS + 1))
    assert all(mine[step][0] == pytest.approx(theirs[step][0], abs=1e-5) for step in mine)


def test_a_rank_that_is_killed_ends_all_and_the_run_repeats_its_steps_bit_for_bit(
    config, left_alone, forks, tmp_path
):
    run = tmp_path / "run"
    running = Command("train", config, "--run.folder", run)
    try:
        running.until(lambda: f" 14/{STEPS} " in running.printed())
        running.ranks()[1].kill()
        code, _, err = running.output()
    finally:
        running.close()
    assert code == 1
    assert "rank 1 was killed by signal 9" in err
    assert "Traceback" not in err, "the others only lost their peer"
    code, out, err = forks("train", config, "--run.folder", run)
    assert (code, err) == (0, "")
    assert "steps were repeated" in out or "was repeated" in out or max(metrics(run)) == STEPS
    assert metrics(run) == metrics(left_alone[0])
    assert compare_checkpoints(checkpoint(run, STEPS), checkpoint(left_alone[0], STEPS)) == []


def test_the_traceback_of_the_rank_whose_block_raised_is_shown_and_nobody_waits_for_it(
    config, forks, tmp_path
):
    code, out, err = forks(
        "train",
        config,
        "--model.source",
        f"{config.parent}/model.py:breaks",
        "--run.folder",
        tmp_path / "run",
    )
    assert code == 1
    assert (out + err).count("Traceback") == 1
    assert "failed at step 2 (training)" in err
    assert err.count("ValueError: planted in a block") == 1


def test_a_rank_that_is_stopped_in_mid_schedule_is_named_with_what_the_others_wait_for(
    config, forks, tmp_path
):
    limits = ("--run.limits.first_step_s", 3, "--run.limits.step_s", 3)
    code, _, err = forks(
        "train",
        config,
        "--model.source",
        f"{config.parent}/model.py:stops",
        "--run.folder",
        tmp_path / "run",
        *limits,
    )
    assert code == 1
    assert "Traceback" not in err
    blamed = err[err.index(" did not issue ") - len("rank N") :]
    assert blamed.startswith("rank 1 did not issue rank ")  # 0 waits for a gradient, 2 for a value
    assert "'s recv of float32 [3, 16, 16] from index 1 for RECV" in blamed
    assert "rank 1 did not answer: its process is stopped" in blamed
    assert "repair: find out why rank 1 did not proceed" in blamed


def test_the_report_draws_who_works_when_planned_above_measured(left_alone, forks, tmp_path):
    page = tmp_path / "report.html"
    code, _, err = forks("report", left_alone[0], "--out", page)
    assert (code, err) == (0, "")
    text = page.read_text()
    section = text[text.index("<h2>Pipeline schedule</h2>") :]
    drawn = section[: section.index("</svg>")]
    assert drawn.index("planned: ") < drawn.index("measured, step")
    assert all(
        word in drawn
        for word in ("rank 0", "rank 2", "bubble", "exposed communication", "forward of microbatch 3", "KiB")
    )
    assert "pp2 planned, at its peak" in text


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (("--mesh.pp", 5), "5 ranks for a model that can be cut into 4 stages", "set mesh.pp to 4 at most"),
        (("--strategies.pipeline.schedule", "1b1f"), "there is no schedule '1b1f'", "did you mean '1f1b'?"),
        (
            ("--strategies.pipeline.split_points", '["layers.7"]'),
            "'layers.7' is not a block call",
            "did you mean 'layers.1'?",
        ),
        (
            ("--strategies.pipeline.split_pointz", "[]"),
            "there is no key 'split_pointz' here",
            "did you mean 'split_points'?",
        ),
        (
            ("--model.source", "model.py:counts"),
            "the buffer 'seen' is written between blocks",
            "persistent=False",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_words(config, forks, monkeypatch, words, what, fix):
    monkeypatch.chdir(config.parent)
    said: Said = forks("plan", config, *words)
    assert said[0] == 2
    assert what in said[2]
    assert fix in said[2]


def test_the_plan_shows_stages_boundaries_and_schedule_and_warns_of_few_micro_batches(config, forks):
    out = forks("plan", config, "--actions")[1]
    assert "stage  rank  blocks" in out
    assert "0 | 1 layers.0 0 > 1 3 x 16 x 16 float32" in " ".join(out.split())
    drawn = out[out.index("planned, by FLOPs: ") :].splitlines()
    assert [line[:6] for line in drawn[1:7]] == ["rank 0", "rank 1", "rank 2", "mem  0", "mem  1", "mem  2"]
    assert " has the largest peak" in out
    assert "microbatches for 3 pipeline stages" not in out
    few = forks("plan", config, "--micro_batch", 6)[1]
    assert "2 microbatches for 3 pipeline stages: bubble" in few
    assert "planned, by FLOPs: " in forks("plan", config)[1]
