"""The config of `init`: plan accepts it, its comments are those of the reference, nothing is overwritten."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

from meshwright.commands.config_help.starter_config import (
    TABLES,
    config_text,
    starter_values,
    write_starter_config,
)
from meshwright.plan.job.errors import PlanError
from tests.command_line import LLAMA, TEXT, invoke


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "llama.json")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text(TEXT)
    return str(tmp_path / "corpus.txt")


@pytest.mark.parametrize(("devices", "batch", "mesh"), [(1, 8, "one device"), (2, 16, "dp_replicate 2")])
def test_plan_accepts_the_config_and_samples_are_split_over_the_devices(
    tmp_path: Path, model: str, corpus: str, devices: int, batch: int, mesh: str
):
    _, ready = write_starter_config(model, corpus, tmp_path / "config.toml", devices)
    assert (ready.plan.job.train.batch, str(ready.plan.mesh)) == (batch, mesh)


def test_the_command_writes_the_config_and_shows_its_plan(
    tmp_path: Path, model: str, corpus: str, capsys: pytest.CaptureFixture[str]
):
    code, out, err = invoke(capsys, "init", model, "--data", corpus, "--out", tmp_path / "new.toml")
    assert (code, err) == (0, "")
    assert "mesh        1 rank: one device" in out
    assert out.rstrip().endswith(f"config written to {tmp_path / 'new.toml'}")
    assert "--data" in invoke(capsys, "init", model)[2]


def test_a_path_with_quotes_is_written_as_toml_escapes_it(tmp_path: Path):
    text = config_text({"model.source": 'a "b" \\ c', "data.source": "d"}, "c.toml")
    assert tomllib.loads(text)["model"] == {"source": 'a "b" \\ c'}


def test_a_sample_is_no_longer_than_the_positions_of_the_model(tmp_path: Path, model: str, corpus: str):
    write_starter_config(model, corpus, tmp_path / "config.toml", 1)
    assert tomllib.loads((tmp_path / "config.toml").read_text())["data"]["sequence"] == 64


def test_the_file_has_every_key_of_its_tables_with_its_meaning_and_default():
    text = config_text({"model.source": "m", "data.source": "d"}, "c.toml")
    for table, names in TABLES.items():
        assert f"[{table}]" in text
        assert all(f"\n{name} = " in text or f"\n# {name} = " in text for name in names)
    assert "# batch is the number of samples of one step, over all ranks.\n# batch = 8\n" in text
    assert tomllib.loads(text)["model"] == {"source": "m"}


def test_commented_keys_are_valid_when_their_sign_is_removed():
    text = config_text({"model.source": "m", "data.source": "d"}, "c.toml")
    before_strategies = text.partition("# Techniques follow")[0].splitlines()
    lines = [line.removeprefix("# ") if " = " in line else line for line in before_strategies]
    assert tomllib.loads("\n".join(lines))["train"]["steps"] == 1000


def test_a_folder_with_a_tokenizer_is_its_own_tokenizer(tmp_path: Path, corpus: str):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(PlanError):  # an empty tokenizer cannot be read, which plan says
        write_starter_config(str(folder), corpus, tmp_path / "config.toml", 1)
    written = tomllib.loads((tmp_path / "config.toml").read_text())
    assert written["data"]["tokenizer"] == str(folder)


def test_an_existing_file_is_not_replaced(tmp_path: Path, model: str, corpus: str):
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(PlanError, match=r"config.toml exists\n  repair: name another file"):
        write_starter_config(model, corpus, tmp_path / "config.toml", 1)
    assert (tmp_path / "config.toml").read_text() == "mine"


def test_where_a_gpu_has_bfloat16_matrix_products_are_in_it(
    model: str, corpus: str, monkeypatch: pytest.MonkeyPatch
):
    assert "precision.compute" not in starter_values(model, corpus, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    assert starter_values(model, corpus, 1)["precision.compute"] == "bfloat16"
