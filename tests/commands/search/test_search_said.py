"""`search MODEL` on the command line: every option has an effect; missing and contradicting options are
refused.
"""

import json
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.error_output import console
from tests.command_line import forget_ranks, invoke

SMALL = "small: layers 24 hidden 2048 heads 16 gated vocab 32000"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_ranks(monkeypatch)


def test_a_limit_is_looked_for_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--hardware", "a100", "--batch", 64, "--fit", "devices", "--json", tmp_path / "said.json"]
    code, out, _ = invoke(capsys, "search", SMALL, *words, "--out", tmp_path / "plan.toml")
    assert code == 0
    found = json.loads((tmp_path / "said.json").read_text())["limit"]
    assert (found["quantity"], found["next_value"]) == ("devices", 0) or found["value"] > found["next_value"]
    assert f"The fewest devices are {found['value']}" in " ".join(out.split())
    assert tomllib.loads((tmp_path / "plan.toml").read_text())["train"]["batch"] == 64


def test_the_largest_batch_needs_no_batch(capsys: pytest.CaptureFixture[str]):
    code, out, _ = invoke(capsys, "search", SMALL, "--hardware", "a100", "--devices", 8, "--fit", "batch")
    assert code == 0
    assert "The largest batch without gradient accumulation is" in " ".join(out.split())


def test_heterogeneous_devices_need_no_number_of_devices(capsys: pytest.CaptureFixture[str]):
    code, out, _ = invoke(capsys, "search", SMALL, "--hardware", "h100:8,a100:8", "--batch", 64)
    assert code == 0
    text = " ".join(out.split())
    assert "on 8 H100 and 8 A100" in text
    assert "The 8 H100 alone take" in text


def test_a_plot_is_written_and_fixed_choices_are_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--hardware", "a100", "--devices", 8, "--batch", 64, "--set", "zero=2", "--set", "micro_batch=4"]
    code, out, _ = invoke(
        capsys, "search", SMALL, *words, "--plot", tmp_path / "plot.html", "--tokens", 1e9, "--price", 2
    )
    assert code == 0
    assert (tmp_path / "plot.html").read_text().startswith("<!DOCTYPE html>")
    text = " ".join(out.split())
    assert "ZeRO 2" in text
    assert "x 4 sequences" in text
    assert "cost of waiting" in text
    assert "energy, kWh" in text


def test_what_is_assumed_and_the_next_command_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--hardware", "h100", "--devices", 16, "--batch", 64]
    code, out, _ = invoke(capsys, "search", SMALL, *words)
    assert code == 0
    text = " ".join(out.split())
    assert "precision parameters and gradients in bfloat16, float32 master weights and AdamW states" in text
    assert "8 on a host" in text
    assert "bubble % exposed comm % configuration" in text
    assert "next: add --out job.toml" in text
    path = tmp_path / "my job.toml"
    assert f"next: meshwright plan '{path}'" in invoke(capsys, "search", SMALL, *words, "--out", path)[1]


def test_no_word_of_a_search_is_broken_at_80_columns(capsys: pytest.CaptureFixture[str]):
    words = ["--hardware", "h100", "--devices", 64, "--batch", 512, "--tokens", 1e12, "--price", 2]
    narrow = invoke(capsys, "search", SMALL, *words)[1]
    assert max(map(len, narrow.splitlines())) <= 80
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "_width", 1000)
        wide = invoke(capsys, "search", SMALL, *words)[1]
    assert set(narrow.split()) <= set(wide.split())


def test_sizes_alone_are_not_enough(capsys: pytest.CaptureFixture[str]):
    code, _, err = invoke(capsys, "search", SMALL)
    assert code == 2
    assert "--devices and --hardware and --batch are missing" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "a100", "--batch", 64], "--devices is missing"),
        (["--hardware", "a100", "--devices", 8], "--batch is missing"),
        (
            ["--hardware", "a100:4,h100:4", "--devices", 9, "--batch", 64],
            "--devices 9, and a100:4,h100:4 are 8",
        ),
        (["--hardware", "a100:4,h100", "--batch", 64], "how many devices are h100?"),
        (["--hardware", "a100:4,h100:4", "--batch", 64, "--fit", "layers"], "on several kinds of devices"),
        (["--hardware", "a100:4,h100:4", "--batch", 64, "--cluster", "c.toml"], "leave it out"),
        (["--hardware", "a100", "--devices", 8, "--batch", 64, "--fit", "bach"], "did you mean 'batch'?"),
        (["--hardware", "a100", "--devices", 8, "--batch", 64, "--price", 2], "no training time to price"),
        (
            ["--hardware", "a100", "--devices", 8, "--batch", 64, "--tokens", "inf"],
            "needed are finite numbers",
        ),
        (["--hardware", "a100", "--devices", 8, "--batch", 64, "--tokns", "1e9"], "did you mean '--tokens'?"),
        (
            ["--hardware", "a100", "--devices", 8, "--batch", 64, "--train.steps", 3],
            "--train.steps: `search` has no such option",
        ),
        (
            ["--hardware", "a100", "--devices", 8, "--batch", 64, "--world", 4],
            "--world: `search` has no such option",
        ),
        (["--hardware", "a100:\u00b2", "--batch", 64], "how many devices are a100?"),
        (
            ["--hardware", "a100", "--devices", 8, "--batch", 64, "--out", "/nowhere/plan.toml"],
            "it cannot be written",
        ),
        (
            ["--hardware", "a100", "--devices", 8, "--batch", 64, "--json", "/nowhere/said.json"],
            "it cannot be written",
        ),
    ],
)
def test_missing_and_contradicting_options_are_reported(
    options: list[object], message: str, capsys: pytest.CaptureFixture[str]
):
    code, _, error = invoke(capsys, "search", SMALL, *options)
    assert code
    assert message in " ".join(error.split())
    assert "repair" in error
