"""Evaluation through the command with two ranks: best checkpoint, early stopping, skipped steps and
refusals.
"""

from pathlib import Path

import pytest

from meshwright.run.telemetry.metrics_log import read_metrics
from tests.command_line import invoke, lay_out, steps_kept

SPIKY = '''


class Spiky(Bytes):
    """Not finite on rows that hold more than two sevens, of which a few steps have one."""

    def forward(self, input_ids):
        x = self.layers[0](self.embed(input_ids))
        bad = (input_ids == ord("7")).sum(1) > 2
        return self.head(self.layers[1](x.masked_fill(bad[:, None, None], float("inf"))))


def spiky():
    return Spiky()


def hearing():
    def heard(moment):
        print(f"heard of step {moment.step}", flush=True)

    return mw.Model(Bytes(), callbacks=[mw.Callback(on_evaluate=heard)])


def deaf():
    return mw.Model(Bytes(), callbacks=[print])
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = lay_out(tmp_path / "job", train={"steps": 12}, evaluate={"hold_out": 20, "every": 4})
    with (path.parent / "model.py").open("a") as file:
        file.write(SPIKY)
    return path


def lines(config: Path, kind: str) -> list[dict]:
    found = read_metrics(config.parent / "run" / "metrics.jsonl")
    return [line for line in found if line.get("kind", "") == kind]


def test_evaluations_are_shown_and_the_best_checkpoint_is_named(config, forks):
    code, out, _ = forks("train", config, "--model.source", config.parent / "model.py:hearing")
    assert code == 0
    found = lines(config, "evaluation")
    assert [line["step"] for line in found] == [4, 8, 12]
    for line in found:
        assert (
            f"step {line['step']}: evaluation loss {line['loss']:.4f}, perplexity {line['perplexity']:.4f}"
            in out
        )
        assert f"heard of step {line['step']}" in out
    assert f"step-00000012 (evaluation loss {found[-1]['loss']:.4f})" in out
    assert "best.json" in steps_kept(config.parent / "run")


def test_a_run_that_ends_early_says_why_and_says_it_again(config, forks):
    early = ("--evaluate.every", 2, "--evaluate.patience", 1, "--evaluate.min_delta", 9.0)
    code, out, _ = forks("train", config, *early)
    assert code == 0
    assert "stopped early at step 4: 1 evaluations did not improve by more than 9" in out
    code, out, _ = forks("train", config, *early)
    assert (code, len(lines(config, ""))) == (0, 4)
    assert "stopped early at step 4" in out


def test_harmful_steps_are_skipped_or_end_the_run_and_the_samples_are_named(config, forks):
    spiky = ("train", config, "--model.source", config.parent / "model.py:spiky", "--evaluate.hold_out", 0)
    code, out, _ = forks(*spiky, "--guard.action", "skip")
    assert code == 0
    found = lines(config, "spike")
    assert 0 < len(found) < 12
    step = found[0]["step"]
    assert f"step {step} was skipped: " in out
    assert "is the first that is not finite" in out
    assert f"{len(found)} of these steps were skipped (guard.action = skip)" in out
    (config.parent / "run").rename(config.parent / "skipped")
    code, out, err = forks(*spiky, "--guard.action", "stop")
    assert code == 2
    assert f"step {step}: the " in err
    culprit = next(rank for rank in found[0]["ranks"] if rank["phase"])
    assert f"samples {', '.join(map(str, culprit['samples']))}" in err
    assert not (config.parent / "run" / "checkpoints").exists() or f"step-{step:08d}" not in steps_kept(
        config.parent / "run"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--evaluate.hold_out", 100_000), "evaluate.hold_out: 100000 samples are held out of"),
        (("--evaluate.source", "nix.txt", "--evaluate.hold_out", 0), "there is no such file or folder"),
        (("--evaluate.source", "nix.txt"), "needed is one of them"),
        (("--guard.action", "skp"), "did you mean 'skip'?"),
        (
            ("--model.frozen", '["hed.weight"]'),
            "model.frozen: 'hed.weight' matches no parameter of the model",
        ),
        (("--model.frozen", '["*"]'), "parameters of build is trained"),
        (
            ("--model.source", "model.py:deaf"),
            "a builtin_function_or_method among the callbacks of the model",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(config, capsys, monkeypatch, words, message):
    monkeypatch.chdir(config.parent)
    code, _, err = invoke(capsys, "train", config, *words)
    assert code == 2
    assert message in " ".join(err.split())
    assert not (config.parent / "run").exists()


def test_another_file_is_evaluated_from_beside_the_config(config, capsys):
    (config.parent / "val.txt").write_text("7 times 8 makes 56\n" * 20)
    text = config.read_text().replace("hold_out = 20", 'source = "val.txt"')
    config.write_text(text)
    code, _, err = invoke(capsys, "plan", config, "--out", config.parent / "plan.toml")
    assert (code, err) == (0, "")
    assert f'source = "{config.parent / "val.txt"}"' in (config.parent / "plan.toml").read_text()
