"""Importing a file: its format is found, unknown options are listed, the written file says what is left."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.commands.config_help.key_reference import TOP_LEVEL, config_tables
from meshwright.commands.import_config.import_config import (
    FORMATS,
    config_text,
    import_config,
    write_imported_config,
)
from meshwright.plan.job.errors import PlanError
from tests.commands.import_config.imported import imported, verdicts


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '{"train_batch_size": 4}', "deepspeed"),
        ("a.json", '{"distributed_type": "NO", "num_processes": 1}', "accelerate"),
        ("a.yaml", "distributed_type: 'NO'", "accelerate"),
        ("a.toml", "[training]\nsteps = 3", "torchtitan"),
        ("a.sh", "python x.py --seed 3", "megatron"),
        ("args", "--seed 3", "megatron"),
    ],
)
def test_the_format_is_that_of_the_file(tmp_path: Path, name: str, text: str, kind: str):
    assert imported(tmp_path, name, text).format == kind


@pytest.mark.parametrize("kind", FORMATS)
def test_every_rule_names_keys_that_exist_or_says_why_not(kind: str):
    keys = {key.name for table in (TOP_LEVEL, *config_tables()) for key in table.keys}
    names = {key.removeprefix("strategies.") for key in keys} | {"mesh", "strategies"}
    names |= {key.partition(".")[0] for key in names}
    for option, rule in FORMATS[kind].items():
        for key in rule.keys:
            assert key in names or key.startswith("model."), f"{option}: {key}"
        assert rule.keys or rule.reason, option
        assert rule.fix or rule.verdict != "refused", option


def test_the_written_file_says_what_is_refused_unknown_and_missing(tmp_path: Path):
    given = {"train_batch_size": 4, "amp": {"enabled": True}, "magic": 1}
    result = imported(tmp_path, "ds.json", given, devices=1)
    text = config_text(result, result.document)
    assert "# refused: amp = {'enabled': True}: apex amp is not there. Repair: " in text
    assert "# unknown: magic = 1: " in text
    assert "# Not in that file, so the defaults hold: optimizer, model.source, data.source" in text
    assert tomllib.loads(text)["train"] == {"batch": 4, "clip": 0.0}


def test_an_option_that_is_unknown_names_the_most_similar(tmp_path: Path):
    result = imported(tmp_path, "ds.json", {"train_batch_sise": 4})
    (found,) = [each for each in result.options if each.verdict == "unknown"]
    assert "did you mean 'train_batch_size'?" in found.text
    assert verdicts(result)["train_batch_sise"] == "unknown"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.yaml", "a: [", "not YAML"),
        ("a.toml", "a = ", "not TOML"),
        ("a.json", "[1]", "the file holds no table of options"),
        ("a.txt", "hello", "the format of this file is not known"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_the_repair(
    tmp_path: Path, name: str, text: str, message: str
):
    with pytest.raises(PlanError, match=f"{message}(?s:.*)repair: "):
        imported(tmp_path, name, text)


def test_a_missing_file_an_unknown_format_and_an_existing_output_are_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="the file cannot be read: No such file"):
        import_config(tmp_path / "none.json", "", "", "", 0)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(PlanError, match="there is no format 'deepsped'\n  repair: did you mean 'deepspeed'"):
        import_config(tmp_path / "a.json", "deepsped", "", "", 0)
    with pytest.raises(PlanError, match=r"a.json exists\n  repair: name another file"):
        write_imported_config(imported(tmp_path, "b.json", {"train_batch_size": 4}), tmp_path / "a.json")


def test_the_command_prints_each_option_and_ends_with_1_while_something_is_refused(tmp_path: Path):
    file, out = tmp_path / "ds.json", tmp_path / "out.toml"
    file.write_text(json.dumps({"train_batch_size": 4, "zero_optimization": {"stage": 1}}))
    done = CliRunner().invoke(app, ["import-config", str(file), "--out", str(out), "--devices", "2"])
    assert done.exit_code == 0, done.output
    assert "zero_optimization.stage = 1\n    mesh.dp_shard = 2; zero.stage = 1" in done.output
    file.write_text(json.dumps({"train_batch_size": 4, "elasticity": {"enabled": True}}))
    again = CliRunner().invoke(app, ["import-config", str(file), "--out", str(tmp_path / "b.toml")])
    assert again.exit_code == 1
    assert "refused: not the same here until you act (1)" in again.output
    assert "repair: set train.batch" in again.output
