"""`inspect`: analyzes the model, and needs nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.commands.inspect_model import explain_model, write_explanation
from meshwright.model.recording.recording_json import load_recording
from meshwright.model.trial.fake_tensor_forward import PROBE_BATCH
from meshwright.plan.job.errors import PlanError

LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 16},
    **{
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
}
NEEDY = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, left, right):
        return self.layers[1](self.layers[0](left) + right)
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "net.py").write_text(NEEDY)
    path = tmp_path / "config.toml"
    lines = (
        "[model]",
        'source = "llama.json"',
        "[data]",
        'source = "nowhere"',
        "[train]",
        "batch = 5",
        "[mesh]",
        "dp_replicate = 3",
    )
    path.write_text("\n".join(lines))
    return path


def test_data_that_is_not_there_and_a_mesh_that_does_not_fit_do_not_matter(config: Path):
    explained = explain_model(config, [])
    found = explained.report
    assert [row.first_block_call for row in found.blocks] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.norm",
        "lm_head",
    ]
    assert (explained.diagnostics, explained.param_itemsize) == ((), 4)
    assert found.blocks[0].output_numel == 32 * 16  # data.sequence = 256 by default; the model takes 32


def test_the_precision_of_the_job_decides_the_bytes(config: Path):
    words = ["--precision.parameters", "bfloat16", "--precision.compute", "bfloat16"]
    assert explain_model(config, words).param_itemsize == 2


def test_a_model_that_is_not_there_is_refused(config: Path):
    with pytest.raises(PlanError, match=r"there is no file .*other\.json"):
        explain_model(config, ["--model.source", "other.json"])


def test_the_command_shows_the_model_and_writes_json(config: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["inspect", str(config), "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    assert "blocks, in the order of their calls" in done.output
    assert json.loads((tmp_path / "found.json").read_text())["class_name"] == "LlamaForCausalLM"


def test_a_forward_that_needs_other_inputs_is_explained_and_then_refused(config: Path, tmp_path: Path):
    source = f"{tmp_path / 'net.py'}:Net"
    done = CliRunner().invoke(app, ["inspect", str(config), "--model.source", source])
    assert done.exit_code == 2
    assert "blocks, in the order of the module tree" in done.output
    said = " ".join((done.output + done.stderr).split())
    assert "and the batch has 'input_ids'" in said
    assert "meshwright.Model(module, example={...})" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "8"], "choose a plan with `meshwright search MODEL`"),
    ],
)
def test_options_that_contradict_each_other_are_refused(config: Path, options: list[str], message: str):
    done = CliRunner().invoke(app, ["plan", str(config), *options])
    assert done.exit_code == 2
    assert message in " ".join((done.output + done.stderr).split())


def test_a_file_that_cannot_be_written_is_refused(config: Path, tmp_path: Path):
    with pytest.raises(PlanError, match=r"the explanation cannot be written: .*(?s:.*)--json"):
        write_explanation(explain_model(config, []), tmp_path / "no" / "folder.json")


def test_with_a_mesh_the_sharding_of_every_parameter_is_shown(config: Path, tmp_path: Path):
    words = ["--mesh.tp", "2", "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, ["inspect", str(config), *words], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "parameters over tp 2" in done.output
    rows = {row["pattern"]: row for row in json.loads((tmp_path / "found.json").read_text())["parameters"]}
    assert rows["model.layers.*.mlp.up_proj.weight"]["config"] == "tp: out side, 32 features"
    assert "no strategy shards norms" in rows["model.norm.weight"]["not_sharded_reason"]


def test_without_a_mesh_the_shardable_layers_are_shown(config: Path):
    done = CliRunner().invoke(app, ["inspect", str(config)], env={"COLUMNS": "200"})
    assert "parameters, if they were sharded over tp 2" in done.output


def test_reasons_against_sharding_are_shown_after_the_tables(config: Path):
    done = CliRunner().invoke(app, ["inspect", str(config), "--mesh.tp", "48"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "parameters over tp 48" in done.output
    assert "set mesh.tp to at most 32" in " ".join((done.output + done.stderr).split())


def test_stages_of_a_model_are_explained_one_by_one(config: Path, tmp_path: Path):
    words = ["--mesh.pp", "2", "--mesh.tp", "2", "--json", str(tmp_path / "found.json")]
    done = CliRunner().invoke(app, ["inspect", str(config), *words], env={"COLUMNS": "240"})
    assert done.exit_code == 0, done.output
    assert "on rank 0" in done.output
    assert "parameters over pp 2 x tp 2" in done.output
    rows = {row["pattern"]: row for row in json.loads((tmp_path / "found.json").read_text())["parameters"]}
    up = rows["model.layers.*.mlp.up_proj.weight"]
    assert up["count"] == 2
    assert sum(up["stage_nbytes"]) == up["nbytes"] // 2
    assert rows["lm_head.weight"]["stage_nbytes"][0] == 0


def test_more_stages_than_blocks_are_reported_after_the_tables(config: Path):
    done = CliRunner().invoke(app, ["inspect", str(config), "--mesh.pp", "48"], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "48 ranks for a model that can be cut into" in " ".join((done.output + done.stderr).split())


def test_a_recording_is_written_and_read_again(config: Path, tmp_path: Path):
    path = tmp_path / "recording.json.gz"
    result = CliRunner().invoke(app, ["inspect", str(config), "--record", str(path)])
    assert result.exit_code == 0, result.output
    recording = load_recording(path)
    assert recording.block_calls[:2] == ("model.embed_tokens", "model.layers.0")
    assert recording.num_samples == PROBE_BATCH


def test_a_model_without_a_forward_has_no_recording(config: Path, tmp_path: Path):
    arguments = ["inspect", str(config), "--record", str(tmp_path / "r.json"), "model.source=net.py:Net"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert not (tmp_path / "r.json").exists()
