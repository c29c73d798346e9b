"""The commands in this process: what they do and refuse, without starting a rank where a request
cannot work.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from tests.command_line import (
    LLAMA,
    SEQUENCE,
    Said,
    become_the_only_rank,
    forget_ranks,
    invoke,
    lay_out,
    refuse_to_start,
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    forget_ranks(monkeypatch)
    return lay_out(tmp_path / "job")


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """Call the command in this process: exit code, stdout, stderr.

    It fails the test when it starts a rank.
    """
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


# plan


def test_a_plan_is_a_table_of_what_will_happen(config, say):
    code, out, err = say("plan", config)
    assert (code, err) == (0, "")
    folded = " ".join(out.split())
    for word in (
        "build: ",
        "2 ranks: 2 data-parallel replicas (dp_replicate)",
        "12 sequences of 16 tokens = 2 data-parallel ranks x 1 micro-batch x 6 sequences",
        "tokenizer bytes, ",
        "gradients all_reduce over dp_replicate",
    ):
        assert word in folded
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 40
    every = say("plan", config, "--actions")[1]
    assert len(every.splitlines()) > len(out.splitlines())


def test_a_plan_file_reads_back_as_the_same_plan(config, say, tmp_path):
    path = tmp_path / "elsewhere" / "plan.toml"
    code, first, _ = say(
        "plan", config, "--mesh.dp_replicate", -1, "--world", 3, "--optimizer.lr", "0.5", "--out", path
    )
    assert code == 0
    assert f"plan written to {path}" in first
    written = tomllib.loads(path.read_text())
    assert (written["mesh"]["dp_replicate"], written["optimizer"]["lr"], written["micro_batch"]) == (
        3,
        0.5,
        4,
    )
    code, second, _ = say("plan", path)
    assert code == 0
    assert written["plan_hash"] in second
    assert first.splitlines()[:-1] == second.splitlines()


def test_an_edited_plan_is_refused_by_every_command(config, say, tmp_path):
    path = tmp_path / "plan.toml"
    say("plan", config, "--out", path)
    path.write_text(path.read_text().replace("batch = 12", "batch = 24"))
    for verb in ("plan", "verify", "train"):
        code, out, err = say(verb, path)
        assert (code, out) == (2, "")
        assert "the file was edited, or the model changed" in err
        assert "repair: remove the line plan_hash" in err
    assert say("plan", path, "--train.batch", 24)[0] == 0, "words behind a plan are meant to change it"


# bad input


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--train.step", 3], "--train.step: there is no key 'step' here", "did you mean 'steps'?"),
        (["--trian.steps", 3], "--trian.steps: there is no key 'trian' here", "did you mean 'train'?"),
        (["--wrold", 3], "there is no key 'wrold'", "options of the command itself: --from-step, --world"),
        (["--mesh.dp_replicat", 2], "there is no axis 'dp_replicat'", "did you mean 'dp_replicate'?"),
        (["--mesh.tp", 2], "no pair of linear layers of build is known to split", "meshwright inspect"),
        (["--mesh.cp", 2], "layers.0 takes cumsum over tokens", "mesh.dp_shard = 2 are as many ranks"),
        (["--mesh.tp_depth", 2], "no strategy uses the axis tp_depth", "give the axis a strategy"),
        (["--mesh.dp_replicate", -1], "dp_replicate is -1 and the number of ranks is not known", "--world N"),
        (["--mesh.dp_replicate", 5], "12 samples does not divide by 5", "set train.batch to 10 or 15"),
        (["--train.batch", 1], "1 samples is too small for 2", "raise train.batch to at least 2"),
        (["--micro_batch", 4], "do not divide by micro_batch = 4", "choose micro_batch from 1, 2, 3, 6"),
        (["--world", 3], "has 2 ranks and 3 were started", "start 2 ranks"),
        (["--data.source", "nowhere"], "there is no such file or folder", "correct data.source"),
        (["--data.source", "example"], "comes without an example batch", "set data.source to a text file"),
        (
            ["--model.source", "nowhere.json"],
            "there is no file nowhere.json",
            "give a folder that holds config.json",
        ),
        (
            ["--run.keep", 0, "--train.steps", 0],
            "steps = 0; needed is a whole number of at least 1",
            "write steps = 1000",
        ),
        (
            ["--run.keep", 0, "--train.steps", 0],
            "keep = 0; needed is a whole number",
            "keep at least 1; with 0 no checkpoint would stay",
        ),
        (
            ["--run.folder", "/dev/null/run"],
            "cannot be made: Not a directory",
            "name a folder that can be written to",
        ),
        (
            ["--from-step", 7],
            "there is no checkpoint of step 7",
            "leave the step out: there is no checkpoint here",
        ),
        (["extra"], "'extra': this is not an override", "write --key.sub value"),
    ],
)
def test_what_cannot_work_is_refused_in_words(config, say, words, what, fix):
    code, _, err = say("train", config, *words)
    assert code == 2
    assert what in err
    assert fix in err
    assert "Traceback" not in err


def test_a_run_that_cannot_begin_at_its_step_is_refused_before_a_rank_starts(config, say, monkeypatch):
    def refuse(plan: Plan, num_steps: int) -> None:
        raise PlanError(f"the record is not of step {num_steps}", fix="record again", location="replay")

    monkeypatch.setattr(Plan, "check_start", refuse)
    code, _, err = say("train", config)
    assert (code, "replay: the record is not of step 0" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["--mesh.pp", 9, "--train.clip", -1], ["train.clip", "mesh.pp"]),
        (
            ["--mesh.pp", 9, "--optimizer.lr", 0, "--run.keep", 0, "--data.source", "nowhere"],
            ["optimizer.lr", "run.keep", "nowhere", "mesh.pp"],
        ),
        (
            ["--model.source", "nowhere.json", "--data.source", "nowhere", "--mesh.pp", 0],
            ["mesh.pp", "model.source", "nowhere"],
        ),
        (
            ["--mesh.dp", 4, "--mesh.tp", 0, "--train.clip", -1, "--train.steps", "x", "--run.keep", 0],
            ["--train.steps", "--mesh.dp", "mesh.tp", "run.keep"],
        ),
        (["--mesh.dp", 4, "--guard.window", 1], ["--mesh.dp", "guard.window"]),
    ],
)
def test_errors_of_several_tables_are_reported_together(config, say, words, places):
    code, _, err = say("train", config, *words)
    assert code == 2
    found = [line.removeprefix("error ") for line in err.splitlines() if line.startswith("error ")]
    assert [line.split(": ")[0].rpartition("/")[2] for line in found] == places


def test_wrong_fields_of_strategies_are_reported_with_those_of_the_job(config, say):
    text = '\n[[strategies]]\nname = "batch_split"\n[[strategies]]\nname = "ddp"\nbucket_mb = 0.0\n'
    config.write_text(config.read_text() + text)
    code, _, err = say("train", config, "--train.clip", -1, "--mesh.dp_replicate", 5)
    assert code == 2
    for place in ("train.clip: ", "strategies.ddp.bucket_mb: ", "train.batch: a global batch of 12"):
        assert f"error {place}" in err


def test_an_axis_named_dp_is_refused_with_the_two_axes_of_data_parallelism(config, say):
    code, _, err = say("plan", config, "--mesh.dp", 4)
    assert code == 2
    assert "--mesh.dp: there is no axis 'dp'" in err
    folded = " ".join(err.split())
    assert "data parallelism is dp_replicate (DDP: full copies) or dp_shard (ZeRO, FSDP: shards)" in folded
    assert "the axes are outer, site, pp, dp_replicate, dp_shard, ep, cp, tp_depth, tp" in folded


def test_an_unknown_strategy_is_refused_with_the_nearest(config, say):
    config.write_text(config.read_text() + '\n[[strategies]]\nname = "naive_dp"\n')
    code, _, err = say("plan", config)
    assert code == 2
    assert "there is no strategy 'naive_dp'" in err
    assert "did you mean 'naive_ddp'?" in err


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "holds 0 bytes"),
        (b"PK\x03\x04\x00\x00\x00", "zero: binary data"),
        (bytes(range(128, 256)) * 9, "are not UTF-8"),
    ],
)
def test_data_that_is_no_text_is_refused(config, say, content, what):
    (config.parent / "text.txt").write_bytes(content)
    code, _, err = say("train", config)
    assert code == 2
    assert what in err
    assert not (config.parent / "run").exists()


def test_a_model_that_cannot_read_these_samples_is_refused(config, say):
    (config.parent / "llama.json").write_text(
        json.dumps({**LLAMA, "vocab_size": 100, "max_position_embeddings": 8})
    )
    code, _, err = say("plan", config, "--model.source", config.parent / "llama.json")
    assert code == 2
    assert "the model has 100 tokens, and text is read as bytes, of which there are 256" in err
    assert "set model.overrides.vocab_size = 256" in err
    assert f"a sample of {SEQUENCE} tokens; the model takes at most 8" in err
    fixed = ["--model.overrides.vocab_size", 256, "--data.sequence", 8]
    assert say("plan", config, "--model.source", config.parent / "llama.json", *fixed)[0] == 0


def test_a_factory_that_raises_is_shown_with_its_own_lines_only(config, say):
    code, _, err = say("plan", config, "--model.source", f"{config.parent / 'model.py'}:constructs_badly")
    assert code == 2
    assert "constructing 'constructs_badly' raised NameError: name 'undefined_width' is not defined" in err
    assert err.startswith("Traceback")
    assert "return nn.Linear(3, undefined_width)" in err
    assert "src/meshwright" not in err


def test_a_rank_of_no_job_is_refused(config, say, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    code, _, err = say("train", config)
    assert code == 2
    assert "RANK is set in the environment, and WORLD_SIZE=''" in err
    assert "unset RANK" in err


# verify


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_on_threads_equals_one_device(config, say, ranks):
    code, out, err = say("verify", config, "--mesh.dp_replicate", ranks)
    assert (code, err) == (0, "")
    assert f"dp_replicate {ranks} equals one device after 3 steps of build, on threads" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    (path,) = (config.parent / "run" / "verify").glob("*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verdict["passed"]
    assert verdict["plan"] == path.parent.name
    assert verdict["max_errors"]["gradient"] < 1e-10
    assert verdict["plan"] in say("plan", config, "--mesh.dp_replicate", ranks)[1]


def test_the_verdict_on_another_plan_in_the_same_run_folder_stays(config, say):
    assert say("verify", config, "--steps", 1)[0] == 0
    (first,) = (config.parent / "run" / "verify").glob("*/verdict.json")
    said = first.read_bytes()
    code, out, _ = say("verify", config, "--steps", 1, "--mesh.dp_replicate", 3)
    assert code == 0
    assert first.read_bytes() == said
    (second,) = {*first.parents[1].glob("*/verdict.json")} - {first}
    assert str(second) in out
    assert json.loads(second.read_text())["plan"] == second.parent.name


def test_a_model_that_mixes_the_samples_of_its_rank_does_not_pass(config, say, tmp_path):
    words = ["--model.source", f"{config.parent / 'model.py'}:centred", "--json", tmp_path / "verdict.json"]
    code, out, err = say("verify", config, *words)
    assert (code, err) == (1, "")
    assert "dp_replicate 2 does NOT equal one device" in out
    assert "cause: loss" in out
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert not verdict["passed"]
    assert (verdict["first_difference"]["step"], verdict["first_difference"]["quantity"]) == (0, "gradient")


def test_a_small_copy_of_an_unmodified_model_is_verified_under_the_name_of_the_plan(config, say):
    words = [
        "--model.source",
        config.parent / "llama.json",
        "--shrink",
        "--model.overrides.num_hidden_layers",
        5,
    ]
    code, out, err = say("verify", config, *words)
    assert (code, err) == (0, "")
    assert "llama scaled down to" in out
    (path,) = (config.parent / "run" / "verify").glob("*/verdict.json")
    verdict = json.loads(path.read_text())
    assert verdict["plan"] in say("plan", config, *words[:2], *words[3:])[1]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--on", "moons"], "ranks cannot run on 'moons'"),
        (["--shrink"], "a model from a factory cannot be scaled down"),
    ],
)
def test_a_comparison_that_cannot_be_made_is_refused(config, say, words, what):
    code, _, err = say("verify", config, *words)
    assert code == 2
    assert what in err


def test_verify_is_no_rank_of_torchrun(config, say, monkeypatch):
    become_the_only_rank(monkeypatch)
    code, _, err = say("verify", config)
    assert code == 2
    assert "it starts its own ranks" in err
    assert not (config.parent / "run" / "verify").exists()
