"""The command line with ZeRO: killed while saving, resumed under other stages and ranks, evaluated, exported,
reported.
"""

import signal
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from meshwright.run.telemetry.metrics_log import read_metrics
from tests.command_line import Command, become_the_only_rank, checkpoint, forget_ranks, invoke, lay_out

STEPS, EVERY = 40, 10
ALONE = {"mesh": {"dp_replicate": 1}}
SPLIT = {"name": "batch_split", "axis": "dp_shard"}
BOTH = [{"name": "batch_split"}, SPLIT]
COURSES: list[dict] = [
    {"mesh": {"dp_replicate": 1, "dp_shard": 2}},  # no strategies: shards of everything
    {"mesh": {"dp_replicate": 1, "dp_shard": 3}, "strategies": [SPLIT, {"name": "zero", "stage": 2}]},
    {
        "mesh": {"dp_replicate": 2, "dp_shard": 2},
        "strategies": [*BOTH, {"name": "zero", "replicate_axis": "dp_replicate", "gather": "step"}],
    },
]


def config_of(folder: Path, run: Path, course: dict, steps: int) -> Path:
    said = {"folder": str(run), "save_every": EVERY, "keep": 9}
    held = {"hold_out": 12, "every": 20}
    return lay_out(
        folder, **course, run=said, train={"steps": steps, "noise_scale": course != ALONE}, evaluate=held
    )


def metrics_of(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "kind" not in line}


@pytest.mark.timeout(300)
def test_a_run_on_shards_that_is_killed_and_resharded_ends_like_one_device(
    tmp_path: Path, forks, capsys, monkeypatch
):
    forget_ranks(monkeypatch)
    run = tmp_path / "run"
    first = config_of(tmp_path / "a", run, COURSES[0], STEPS)
    killed = Command("train", first)
    try:
        killed.until(
            lambda: any((run / "checkpoints").glob("step-*20.partial-*")) or checkpoint(run, 20).exists()
        )
        for process in [psutil.Process(killed.process.pid), *killed.ranks()]:
            process.kill()
        assert killed.output()[0] == -signal.SIGKILL
    finally:
        killed.close()
    assert checkpoint(run, EVERY).is_dir()

    for letter, course, steps in (("b", COURSES[1], 30), ("c", COURSES[2], STEPS)):
        code, out, err = forks("train", config_of(tmp_path / letter, run, course, steps))
        assert (code, err) == (0, "")
        assert "\nresumed from step " in out
        assert "the plan changed since that checkpoint: " in out
        assert f"done: step {steps}, loss " in out
        assert f"step {steps}: evaluation loss " in out
    assert not list((run / "checkpoints").glob("*.partial-*"))

    alone = tmp_path / "alone"
    config = config_of(tmp_path / "d", alone, ALONE, STEPS)
    become_the_only_rank(monkeypatch)
    assert invoke(capsys, "train", config)[0] == 0
    expected, found = metrics_of(alone), metrics_of(run)
    assert expected.keys() == found.keys()
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=2e-4), f"float32, step {step}"

    for each, out in ((run, "ours"), (alone, "theirs")):
        assert invoke(capsys, "export", each, tmp_path / out)[0] == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-3

    assert invoke(capsys, "report", run)[0] == 0
    page = (run / "report.html").read_text()
    assert "UNSHARD(head, F, 0)" in page
