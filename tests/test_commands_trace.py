"""`verify --on trace` as a user meets it, in this process: any rank of any mesh, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import Said, forget_ranks, invoke, lay_out, refuse_to_start

LOOKS = """

class Looks(Bytes):
    def forward(self, input_ids):
        x = super().forward(input_ids)
        return x if x.detach().abs().max().item() < 1e9 else x * 0


def looks():
    return Looks()
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    forget_ranks(monkeypatch)
    return lay_out(tmp_path / "job", mesh={"dp_replicate": 1024}, train={"batch": 1024})


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """Call the command in this process: exit code, stdout, stderr.

    It fails the test when it starts a rank.
    """
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


def verdict_of(config: Path) -> dict:
    (path,) = (config.parent / "run" / "verify").glob("*/trace.json")
    return json.loads(path.read_text())


def test_ranks_of_a_mesh_larger_than_any_machine_are_traced(config, say):
    code, out, err = say("verify", config, "--on", "trace")
    assert (code, err) == (0, "")
    folded = " ".join(out.split())
    assert (
        "of dp_replicate 1024 issued the 3 collectives that the program states, in each of 3 steps" in folded
    )
    assert "build, on fake tensors" in folded
    assert max(map(len, out.splitlines()[:-1])) <= 80
    verdict = verdict_of(config)
    assert (verdict["passed"], verdict["rank_backend"], verdict["ranks"][0], verdict["ranks"][-1]) == (
        True,
        "trace",
        0,
        1023,
    )
    assert verdict["plan"] in say("plan", config)[1]


def test_one_rank_and_the_number_of_steps_can_be_named(config, say, tmp_path):
    path = tmp_path / "named.json"
    code, out, _ = say("verify", config, "--on", "trace", "--rank", 777, "--steps", 1, "--json", path)
    assert code == 0
    assert out.startswith("rank 777 of dp_replicate 1024")
    assert (json.loads(path.read_text())["ranks"], json.loads(path.read_text())["num_steps"]) == ([777], 1)


def test_a_small_copy_is_traced_under_the_name_of_the_plan(config, say):
    words = ["--model.source", config.parent / "llama.json", "--model.overrides.num_hidden_layers", 5]
    code, out, _ = say("verify", config, "--on", "trace", "--rank", 5, "--shrink", *words)
    assert code == 0
    assert "llama scaled down to" in " ".join(out.split())
    assert verdict_of(config)["plan"] in say("plan", config, *words)[1]


def test_a_model_that_reads_values_is_run_on_real_tensors_and_that_is_reported(config, say):
    model = config.parent / "model.py"
    model.write_text(model.read_text() + LOOKS)
    code, out, err = say(
        "verify", config, "--on", "trace", "--rank", 1000, "--model.source", f"{model}:looks"
    )
    assert (code, err) == (0, "")
    assert "looks, on real tensors" in " ".join(out.split())
    assert verdict_of(config)["tensor_kind"] == "real"


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            ["--on", "trace", "--rank", 1024],
            "there is no rank 1024 in dp_replicate 1024",
            "choose from 0 to 1023",
        ),
        (["--rank", 3], "--on threads compares all ranks, and --rank 3 names one", "add --on trace"),
        ([], "1024 ranks on this machine", "--on trace runs single ranks of any mesh"),
        (["--on", "processes"], "1024 ranks on this machine", "compare a smaller mesh"),
    ],
)
def test_what_cannot_be_verified_is_refused_in_words(config, say, words, what, fix):
    code, out, err = say("verify", config, *words)
    assert (code, out) == (2, "")
    assert what in err
    assert fix in err
