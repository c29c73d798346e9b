"""`verify --curve` as a user meets it, in this process: a verdict, its file, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.parallel.compression.residuals import CodedOperand
from tests.command_line import Said, forget_ranks, invoke, lay_out, refuse_to_start

STRATEGIES = [{"name": "batch_split"}, {"name": "ddp"}, {"name": "compress", "mode": "int8"}]
EXACT = STRATEGIES[:2]


@pytest.fixture
def job(tmp_path: Path, monkeypatch) -> Callable[..., Path]:
    """Write a config: the usual job, with int8 gradients unless told otherwise."""
    forget_ranks(monkeypatch)
    return lambda **tables: lay_out(tmp_path / "job", **{"strategies": STRATEGIES, **tables})


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """Call the command in this process: exit code, stdout, stderr. It fails when it starts a process."""
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


def curve_of(config: Path) -> dict:
    (path,) = (config.parent / "run" / "verify").glob("*/curve.json")
    return json.loads(path.read_text())


def test_a_lossy_plan_is_compared_with_its_exact_one_over_three_seeds(job, say):
    config = job(evaluate={"hold_out": 24})
    code, out, err = say("verify", config, "--curve", "--steps", 12)
    assert (code, err) == (0, "")
    assert "seed 2, lossy: loss " in out
    assert "dp_replicate 2 learns as well as its exact counterpart, in 12 steps" in out
    found = curve_of(config)
    assert (found["outcome"], found["passed"], found["num_steps"]) == ("within", True, 12)
    assert [(each["seed"], each["is_exact"]) for each in found["curves"]] == [
        (seed, exact) for seed in (0, 1, 2) for exact in (True, False)
    ]
    assert found["plan"] in say("plan", config)[1]
    assert found["plan"] != found["exact_plan"]
    firsts = [each["held_out"][0] for each in found["curves"]]
    assert firsts[0] == firsts[1]  # equal initial values under a seed
    assert len(set(firsts)) == 3
    exact, lossy = (each["losses"] for each in found["curves"][:2])
    assert exact[0] == lossy[0]  # the same samples
    assert exact != lossy


def test_sites_are_compared_with_one_that_has_all_samples(job, say):
    strategies = [{"name": "local_sgd", "sync_every": 3}]
    config = job(strategies=strategies, mesh={"outer": 2, "dp_replicate": 1}, evaluate={"hold_out": 24})
    code, _, err = say("verify", config, "--curve", "--steps", 11)
    assert code == 2
    assert "step 11 lies in the middle of a round" in err
    code, _, err = say("verify", config, "--curve", "--steps", 12)
    assert (code, err) == (0, "")
    found = curve_of(config)
    exact, lossy = found["curves"][:2]
    assert exact["losses"][0] == pytest.approx(lossy["losses"][0], rel=1e-5)  # the mean of both sites
    assert exact["held_out"][0] == pytest.approx(lossy["held_out"][0], rel=1e-5)
    assert exact["losses"][4] != pytest.approx(lossy["losses"][4], rel=1e-5)
    assert found["mesh"] == "outer 2"


def test_a_residual_with_the_wrong_sign_is_behind(job, say, monkeypatch):
    """What codes lose is taken away again, so that errors grow."""
    add_owed = CodedOperand.add_owed

    def subtract_owed(self):
        self.owed = {name: each * -3 for name, each in self.owed.items()}
        add_owed(self)

    monkeypatch.setattr(CodedOperand, "add_owed", subtract_owed)
    strategies = [*EXACT, {"name": "compress", "mode": "sign"}]
    code, out, _ = say("verify", job(strategies=strategies), "--curve", "--steps", 20)
    assert code == 1
    assert "learns worse than its exact counterpart" in out or "diverges" in out


@pytest.mark.parametrize(
    ("tables", "words", "told"),
    [
        ({"strategies": EXACT}, [], "every strategy of the plan is exact (batch_split, ddp)"),
        ({}, ["--steps", 5], "5 steps are no curve"),
        ({}, ["--steps", 101], "101 steps, and the run has 100"),
        ({"data": {"epochs": 1}}, ["--steps", 100], "the data end after"),
        ({}, ["--on", "trace"], "--curve trains all ranks"),
        ({"mesh": {"dp_replicate": 128}, "train": {"batch": 128}}, [], "128 ranks on this machine"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(job, say, tables, words, told):
    code, out, err = say("verify", job(**tables), "--curve", *words)
    assert (code, out) == (2, "")
    assert told in " ".join(err.split())
