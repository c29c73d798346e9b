"""Data of every kind through the whole command: training, resuming, and refusals before a rank starts."""

import gzip
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
import tomli_w
import tqdm
import transformers

from meshwright.run.launch import local_launcher as launch_module
from meshwright.run.launch.local_launcher import LaunchResult
from tests.command_line import (
    LLAMA,
    TEXT,
    Said,
    become_the_only_rank,
    forget_ranks,
    invoke,
    lay_out,
    metrics,
    refuse_to_start,
)
from tests.run.data.corpora import MARKED, TALKS, jsonl, tokenizer

ROWS = [{"text": line, "id": n} for n, line in enumerate(TEXT.splitlines())]


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> Path:
    """A config for one rank of a small Llama of 400 tokens, beside a JSONL file, a tokenizer and
    conversations.
    """
    forget_ranks(monkeypatch)
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    folder = tmp_path / "job"
    jsonl(folder / "rows.jsonl", ROWS)
    jsonl(folder / "talks.jsonl", [{"messages": talk} for talk in TALKS])
    tokenizer(folder / "tokenizer", MARKED)
    path = lay_out(folder, mesh={"dp_replicate": 1}, train={"steps": 4, "batch": 6})
    (folder / "llama.json").write_text(json.dumps({**LLAMA, "vocab_size": 400}))
    return path


@pytest.fixture
def say(capsys, monkeypatch) -> Callable[..., Said]:
    """Call the command in this process: exit code, stdout, stderr.

    It fails the test when it starts a rank.
    """
    refuse_to_start(monkeypatch)
    return lambda *words: invoke(capsys, *words)


def with_data(config: Path, data: dict, **tables: object) -> Path:
    """`config` with another [data] and, in place of the factory, the Llama; `tables` replace others."""
    document = {
        **_read(config),
        "model": {"source": "llama.json"},
        "data": {"sequence": 16, "tokenizer": "bytes", **data},
        **tables,
    }
    config.write_text(tomli_w.dumps(document))
    return config


def _read(config: Path) -> dict:
    return tomllib.loads(config.read_text())


MIXED = {
    "tokenizer": "tokenizer",
    "sequence": 32,
    "mixture": [
        {"source": "rows.jsonl", "weight": 2.0},
        {"source": "talks.jsonl", "chat": "messages"},
        {"source": "text.txt"},
    ],
}


@pytest.mark.parametrize("data", [{"source": "rows.jsonl"}, MIXED], ids=["bytes", "mixture"])
def test_data_of_any_kind_is_trained_on_with_and_without_workers(config, say, data, monkeypatch):
    become_the_only_rank(monkeypatch)
    with_data(config, data)
    results = []
    for workers in (0, 2):
        folder = config.parent / f"run-{workers}"
        code, _, err = say(
            "train",
            config,
            "--run.folder",
            folder,
            "--run.workers",
            workers,
            "--run.cache",
            config.parent / "c",
        )
        assert (code, err) == (0, "")
        results.append(metrics(folder))
    assert results[0] == results[1]
    assert len(results[0]) == 4
    assert not (config.parent / "run-0" / "cache").exists(), "run.cache says where tokens are kept"


def test_the_sources_are_those_beside_the_config(config, say, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with_data(config, MIXED)
    out = tmp_path / "plans" / "plan.toml"
    assert say("plan", config, "--out", out)[0] == 0
    written = _read(out)["data"]
    assert written["tokenizer"] == str(config.parent / "tokenizer")
    assert [part["source"] for part in written["mixture"]] == [
        str(config.parent / part["source"]) for part in MIXED["mixture"]
    ]
    assert say("plan", out)[0] == 0


def test_a_run_goes_on_with_another_number_of_ranks_and_workers(config, say, forks, monkeypatch):
    with_data(config, MIXED)
    with monkeypatch.context() as alone:
        become_the_only_rank(alone)
        assert say("train", config, "--train.steps", 2, "--run.workers", 1)[0] == 0
        assert say("train", config, "--run.folder", config.parent / "whole")[0] == 0
    code, out, err = forks("train", config, "--mesh.dp_replicate", 2, "--run.workers", 2)
    assert code == 0, err
    assert "resumed from step 2" in out
    for step, (loss, _, tokens, _) in metrics(config.parent / "whole").items():
        assert metrics(config.parent / "run")[step][0] == pytest.approx(loss, rel=1e-5)
        assert metrics(config.parent / "run")[step][2] == tokens


def test_a_stream_is_trained_on_to_its_end_and_says_what_it_costs(config, say, monkeypatch):
    become_the_only_rank(monkeypatch)
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([{"messages": talk} for talk in TALKS]).save_to_disk(
        str(config.parent / "saved")
    )
    data = {
        "source": "saved",
        "streaming": True,
        "tokenizer": "tokenizer",
        "chat": "messages",
        "sequence": 32,
        "epochs": 2,
    }
    with_data(config, data, train={"steps": 50, "batch": 6})
    for workers in (0, 2):
        folder = config.parent / f"run-{workers}"
        assert say("train", config, "--run.folder", folder, "--run.workers", workers)[0] == 0
        found = metrics(folder)
        assert sorted(found) == [1, 2, 3], "18 conversations in steps of 6"
    assert metrics(config.parent / "run-0") == metrics(config.parent / "run-2")
    assert (config.parent / "run-0" / "checkpoints" / "step-00000003").is_dir()


def test_what_is_cut_is_said_before_training(config, capsys, monkeypatch):
    monkeypatch.setattr(launch_module, "launch_ranks", lambda *args: LaunchResult(0))
    with_data(config, {"source": "talks.jsonl", "tokenizer": "tokenizer", "chat": "messages", "sequence": 20})
    _, out, _ = invoke(capsys, "train", config)
    assert "conversations are longer than data.sequence = 20 and are cut" in out


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (
            {"source": "rows.jsonl", "column": "txet"},
            "there is no column 'txet'; the columns are: text, id",
            "did you mean 'text'?",
        ),
        ({"source": "none.jsonl"}, "none.jsonl: there is no such file or folder", "correct data.source"),
        ({"source": "broken.jsonl"}, "broken.jsonl:2: not JSON", "repair this line"),
        (
            {"source": "empty.jsonl"},
            "holds no text in the column 'text': it is empty",
            "data that is not empty",
        ),
        (
            {"source": "numbers.jsonl"},
            "numbers.jsonl:1: the column 'text' holds a value of type int",
            "repair the row",
        ),
        ({"source": "cut.jsonl.gz"}, "it cannot be read to its end", "write or download it again"),
        (
            {"source": "rows.jsonl", "tokenizer": "text.txt"},
            "no tokenizer: there is no folder",
            "name a folder with tokenizer.json",
        ),
        (
            {"source": "talks.jsonl", "chat": "messages"},
            "conversations (chat = 'messages') with bytes as tokens",
            "data.tokenizer",
        ),
        (
            {"source": "text.txt", "chat": "m", "tokenizer": "tokenizer"},
            "which plain text files have not",
            'data.format = "jsonl"',
        ),
        ({"source": "rows.jsonl", "workers": 2}, "there is no key 'workers' here", "write run.workers"),
        ({"source": "rows.jsonl", "format": "json"}, 'given is "json"; needed is', "did you mean 'jsonl'?"),
        (
            {"mixture": [{"source": "rows.jsonl", "wweight": 1.0}]},
            "there is no key 'wweight' here",
            "did you mean 'weight'?",
        ),
        (
            {"mixture": [{"source": "rows.jsonl", "weight": 0.0}]},
            "data.mixture.0.weight: weight = 0.0",
            "above 0",
        ),
        (
            {"source": "rows.jsonl", "streaming": True},
            "streaming = True, which JSONL files have not",
            'format = "datasets"',
        ),
    ],
)
def test_what_cannot_work_is_refused_before_a_rank_starts(config, say, data, what, fix):
    whole = gzip.compress(json.dumps(ROWS[0]).encode() * 99)
    for name, content in {
        "broken": b'{"text": "x"}\n{"text"',
        "empty": b"",
        "numbers": b'{"text": 3}',
    }.items():
        (config.parent / f"{name}.jsonl").write_bytes(content)
    (config.parent / "cut.jsonl.gz").write_bytes(whole[:-9])
    code, _, err = say("train", with_data(config, data))
    assert code == 2
    assert what in err
    assert fix in err
    assert "Traceback" not in err


def test_a_model_is_trained_with_the_tokenizer_of_its_folder_and_exported_with_it(config, say, monkeypatch):
    become_the_only_rank(monkeypatch)
    folder = model_folder(config)
    with_data(config, {"source": "text.txt", "tokenizer": ""}, model={"source": "llama"})
    code, out, err = say("train", config)
    assert (code, err) == (0, "")
    assert "data  tokenizer llama, " in out
    assert _read(config.parent / "run" / "plan.toml")["data"]["tokenizer"] == str(folder)
    assert say("export", config.parent / "run", config.parent / "out")[0] == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (config.parent / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_a_model_that_was_trained_on_bytes_is_exported_with_a_tokenizer_of_bytes(config, say, monkeypatch):
    become_the_only_rank(monkeypatch)
    model_folder(config)
    with_data(config, {"source": "text.txt"}, model={"source": "llama"})
    code, out, _ = say("train", config)
    assert code == 0
    assert "data  tokenizer bytes, " in out
    assert say("export", config.parent / "run", config.parent / "out")[0] == 0
    exported = transformers.AutoTokenizer.from_pretrained(config.parent / "out")
    assert exported(TEXT)["input_ids"] == list(TEXT.encode())
    assert (exported.vocab_size, exported.eos_token_id) == (256, 0)
    assert json.loads((config.parent / "out" / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((config.parent / "out" / "generation_config.json").read_text())["eos_token_id"] == 0


def test_a_vocabulary_larger_than_bytes_needs_a_tokenizer_by_name(config, say):
    with_data(config, {"source": "text.txt", "tokenizer": ""})
    code, _, err = say("plan", config)
    assert code == 2
    assert "error data.tokenizer: a model of 400 tokens, and '" in err
    assert "comes without a tokenizer" in err
    assert 'data.tokenizer = "bytes"' in err
    code, out, _ = say("plan", config, "--data.tokenizer", "bytes")
    assert code == 0
    assert "data tokenizer bytes" in " ".join(out.split())
    code, out, _ = say("plan", config, "--model.overrides.vocab_size", 256)
    assert code == 0
    assert "data tokenizer bytes" in " ".join(out.split())


def model_folder(config: Path) -> Path:
    """The folder `llama` beside `config`: the config of the Llama, with a tokenizer."""
    folder = config.parent / "llama"
    tokenizer(folder)
    (folder / "config.json").write_bytes((config.parent / "llama.json").read_bytes())
    return folder


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_sample_that_fills_a_batch_alone_is_a_warning(config, capsys, monkeypatch, command):
    monkeypatch.setattr(launch_module, "launch_ranks", lambda *args: LaunchResult(0))
    (config.parent / "short.txt").write_text("sixteen bytes!!!")
    with_data(config, {"source": "short.txt"})
    code, out, _ = invoke(capsys, command, config)
    folded = " ".join(out.split())
    assert code == 0
    assert (
        "data tokenizer bytes, 1 sample, 16 tokens, 24 epochs, 0 % padding, 6.2 % of labels ignored" in folded
    )
    assert "warning: one sample occurs 6 times in a batch of 6, because its data has 1 sample" in folded


def test_a_part_of_a_mixture_that_is_too_small_is_a_warning(config, say):
    (config.parent / "short.txt").write_text("sixteen bytes!!!" * 2)
    parts = [{"source": "text.txt", "weight": 1.0}, {"source": "short.txt", "weight": 2.0}]
    with_data(config, {"mixture": parts})
    folded = " ".join(say("plan", config)[1].split())
    assert "epochs by source" in folded
    assert (
        "one sample occurs 2 times in a batch of 6, because its source of the mixture has 2 samples" in folded
    )


def test_a_tokenizer_that_does_not_fit_the_vocabulary_is_refused_before_tokenizing(config, say):
    with_data(config, {"source": "rows.jsonl", "tokenizer": "tokenizer", "sequence": 16})
    code, _, err = say("train", config, "--model.overrides.vocab_size", 329)
    assert code == 2
    assert "the model has 329 tokens, and the ids of the tokenizer" in err
    assert "run up to 329" in err
    assert "set model.overrides.vocab_size = 330, or choose the tokenizer that belongs to the model" in err
    assert not (config.parent / "run").exists()
    assert say("plan", config, "--model.overrides.vocab_size", 330)[0] == 0


def test_a_factory_whose_embedding_is_too_small_is_refused_too(config, say):
    with_data(config, {"source": "rows.jsonl", "tokenizer": "tokenizer"}, model={"source": "model.py:build"})
    code, _, err = say("plan", config)
    assert code == 2
    assert "the model has 256 tokens, and the ids of the tokenizer" in err
    assert "make its embedding and head at least 330 large" in err


def test_an_example_batch_takes_no_words_about_text(config, say):
    with_data(
        config,
        {"source": "example", "tokenizer": "tokenizer", "column": "body"},
        model={"source": "model.py:build"},
    )
    code, _, err = say("plan", config)
    assert code == 2
    for name in ("tokenizer", "column"):
        assert f"data.{name}: {name} = " in err
    assert "with the example batch, which is used unchanged" in err


def test_fewer_than_no_workers_are_refused(config, say):
    code, _, err = say("plan", config, "--run.workers", -1)
    assert (code, "run.workers: workers = -1" in err) == (2, True)
