"""`plan CONFIG --devices N`: infers an axis, chooses a mesh, or says what is wrong."""

import json
from pathlib import Path

import pytest

from meshwright.commands.plan import read_config
from meshwright.commands.search.plan_for_devices import resolve_for_devices
from meshwright.plan.job.errors import PlanError
from meshwright.plan.plan import Plan
from tests.command_line import TEXT, forget_ranks, invoke
from tests.commands.search.test_best_plan_to_config import LLAMA, MIXTRAL


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    (tmp_path / "text.txt").write_text(TEXT)
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nsource = "llama.json"\n[data]\nsource = "text.txt"\nsequence = 24\n[train]\nbatch = 12\n'
    )
    return path


def resolved(config: Path, *words: str, devices: int = 4, hardware: str = "") -> tuple[Plan, str]:
    _, ready = resolve_for_devices(read_config(config, words, hardware, ""), devices)
    return ready.plan, " ".join(ready.notes)


def test_without_hardware_all_devices_share_the_states(config: Path):
    plan, notes = resolved(config)
    assert str(plan.mesh) == "dp_shard 4"
    assert [strategy.name for strategy in plan.strategies] == ["batch_split", "zero"]
    assert "the config names no mesh; chosen: dp_shard 4" in notes
    assert "--hardware h100" in notes


def test_with_hardware_data_parallelism_comes_first_for_a_model_that_fits(config: Path):
    plan, notes = resolved(config, hardware="h100")
    assert plan.mesh.dp_replicate * plan.mesh.dp_shard == 4
    assert "chosen: dp 4" in notes


def test_a_job_that_excludes_ep_is_searched_without(config: Path):
    (config.parent / "llama.json").write_text(json.dumps(MIXTRAL))
    plan, notes = resolved(config, "--train.noise_scale", "true", hardware="h100")
    assert str(plan.mesh) == "dp_shard 4"
    assert "not chosen: dp 4, ep 4" in notes


def test_the_reason_why_it_does_not_come_first_is_a_note(config: Path):
    plan, notes = resolved(config, devices=8, hardware="h100")
    assert plan.mesh.world_size == 8
    assert "a batch of 12 sequences does not divide by 8 devices" in notes


def test_an_axis_of_minus_one_is_inferred(config: Path):
    plan, notes = resolved(config, "--mesh.dp_replicate", "-1", "--mesh.tp", "2", hardware="h100")
    assert str(plan.mesh) == "dp_replicate 2 x tp 2"
    assert "names no mesh" not in notes


def test_a_mesh_of_another_size_is_refused(config: Path):
    with pytest.raises(PlanError, match="has 2 ranks and 4 were started") as raised:
        resolved(config, "--mesh.dp_shard", "2")
    assert "meshwright plan CONFIG --devices 4" in raised.value.diagnostics[0].fix


def test_a_batch_that_does_not_divide_is_refused_with_the_repair(config: Path):
    with pytest.raises(PlanError, match="does not divide by 5") as raised:
        resolved(config, devices=5)
    assert "set train.batch to" in raised.value.diagnostics[0].fix


def test_the_micro_batch_of_the_config_is_kept(config: Path):
    plan, _ = resolved(config, "--micro_batch", "1", hardware="h100")
    assert plan.micro_batch == 1


def test_overrides_of_the_model_count(config: Path):
    plan, _ = resolved(config, "--model.overrides.num_hidden_layers", "2", hardware="h100")
    assert "model.layers.2" not in plan.model_spec.block_calls


def test_a_model_that_is_not_searched_gets_data_parallelism_with_the_reason(config: Path):
    folder = config.parent
    (folder / "net.py").write_text(
        "import torch\nfrom torch import nn\nimport meshwright as mw\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])\n\n"
        "    def forward(self, x):\n"
        "        return self.layers[1](torch.tanh(self.layers[0](x)))\n\n"
        "def build():\n"
        "    loss = mw.Loss(lambda outputs, batch: outputs.square().sum(), lambda batch: "
        "torch.tensor(len(batch['x'])), ())\n"
        "    return mw.Model(Net(), example={'x': torch.ones(12, 4)}, loss=loss)\n"
    )
    words = ("--model.source", f"{folder / 'net.py'}:build", "--data.source", "example")
    plan, notes = resolved(config, *words, hardware="h100")
    assert str(plan.mesh) == "dp_shard 4"
    assert "a model without a config: its sizes are not known" in notes


def test_unknown_hardware_is_refused(config: Path):
    with pytest.raises(PlanError, match="'foo' is not a known device"):
        resolved(config, hardware="foo")


def test_what_was_chosen_is_written_and_accepted_without_devices(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    words = ["--devices", 4, "--hardware", "h100", "--out", tmp_path / "plan.toml"]
    code, out, err = invoke(capsys, "plan", config, *words)
    assert (code, err) == (0, "")
    assert "4 data-parallel" in out
    code, again, _ = invoke(capsys, "plan", tmp_path / "plan.toml")
    assert code == 0
    assert again.splitlines()[:4] == out.splitlines()[:4]
    code, _, err = invoke(capsys, "plan", tmp_path / "plan.toml", "--devices", 8)
    assert code == 2
    assert "4 ranks and 8 were started" in err


def test_world_and_devices_are_the_same(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    forget_ranks(monkeypatch)
    one, other = (invoke(capsys, "plan", config, flag, 2)[1] for flag in ("--world", "--devices"))
    assert one == other
