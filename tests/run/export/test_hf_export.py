"""Export to a Hugging Face folder: its files, bounded memory, and a round trip."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from meshwright.model.loading.deferred_init import defer_init
from meshwright.model.loading.safetensors_reader import INDEX_FILE, SINGLE_FILE, list_tensors
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.export import hf_export as export_module
from meshwright.run.export.hf_export import ExportableModel, check_round_trip, export_model, initial_model
from meshwright.run.export.roundtrip_check import RoundTripResult
from meshwright.run.export.stored_tensors import StoredTensors
from tests.model.published_models import FAMILIES, load_published, logits, made, published


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_out_and_comes_back(tmp_path: Path, family: str):
    published(tmp_path / "config", family)
    out, back = check_round_trip(ModelConfig(str(tmp_path / "config")), 5, tmp_path / "out")
    assert out.passed, str(out)
    assert back.passed, str(back)
    assert max(out.max_difference, back.max_difference) <= 1e-6
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("config", "out")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("family", ["mixtral", "gpt2"])
def test_the_names_in_the_file_are_those_that_transformers_writes(tmp_path: Path, family: str):
    published(tmp_path / "theirs", family)
    export_model(initial_model(load_published(tmp_path / "theirs").deferred_init), tmp_path / "ours")
    theirs, ours = load_file(tmp_path / "theirs" / SINGLE_FILE), load_file(tmp_path / "ours" / SINGLE_FILE)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_files_are_cut_at_the_size_and_the_index_is_read_by_transformers(tmp_path: Path):
    theirs = published(tmp_path / "in", "mixtral")
    made_ = export_model(
        initial_model(load_published(tmp_path / "in").deferred_init), tmp_path / "out", max_shard_nbytes=9000
    )
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(shard.stat().st_size < 9000 + 8000 for shard in shards)
    assert set(json.loads((tmp_path / "out" / INDEX_FILE).read_text())["weight_map"]) == set(
        list_tensors(tmp_path / "out")
    )
    assert made_.nbytes == sum(stored.nbytes for stored in list_tensors(tmp_path / "out").values())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(theirs))


def test_a_narrower_dtype_is_written_said_and_measured(tmp_path: Path):
    theirs = published(tmp_path / "in")
    made_ = export_model(
        initial_model(load_published(tmp_path / "in").deferred_init), tmp_path / "out", torch.bfloat16
    )
    assert {stored.dtype for stored in list_tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert made_.round_trip.passed
    assert 0 < made_.round_trip.rounding_difference < 0.1
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (logits(back) - logits(theirs)).abs().max() < 0.1


def test_the_tokenizer_and_the_generation_config_come_along_and_the_cache_is_used_again(tmp_path: Path):
    published(tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / "in" / name).write_text("{}")
    (tmp_path / "in" / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    trained = initial_model(load_published(tmp_path / "in").deferred_init)
    files = export_model(
        ExportableModel(trained.deferred_init, trained.read_value, tmp_path / "in"), tmp_path / "out"
    ).files
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(files)
    assert "notes.txt" not in files
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True


def test_one_group_of_tensors_is_held_at_a_time(tmp_path: Path):
    published(tmp_path / "in", "mixtral")
    trained = initial_model(load_published(tmp_path / "in").deferred_init)
    alive, most = [], []

    def value(name: str) -> torch.Tensor:
        found = trained.read_value(name)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(found.untyped_storage()))
        most.append(sum(not reference.expired() for reference in alive))
        return found

    stored = StoredTensors.of_model(trained.deferred_init, lambda name: value(name).dtype, None)
    most.clear()
    slots = export_module._slots(stored.without_values(), 10**9)
    begins = export_module._write_headers(tmp_path, slots)
    export_module._write_tensors(tmp_path, slots, begins, stored, value)
    assert len(most) == len(trained.deferred_init.logical_params)
    assert max(most) <= 2  # the last one may still be held by the loop


class TiedNet(nn.Module):
    """A module of nobody in particular: a head with the weight of the embedding, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def test_a_module_of_anybody_is_written_under_logical_names(tmp_path: Path):
    made_ = export_model(initial_model(defer_init(TiedNet, 0)), tmp_path / "out", torch.bfloat16)
    assert made_.files == (SINGLE_FILE,)
    assert made_.round_trip.passed
    assert "tensors read back" in str(made_.round_trip)
    found = list_tensors(tmp_path / "out")
    assert set(found) == {
        *("embed.weight", "norm.weight", "norm.bias", "head.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }
    assert found["norm.running_var"].dtype == torch.float32
    assert found["embed.weight"].dtype == torch.bfloat16


def test_a_failed_comparison_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published(tmp_path / "in")
    monkeypatch.setattr(export_module, "compare_logits", lambda *given: RoundTripResult("planted", 1.0, 1e-6))
    made_ = export_model(initial_model(load_published(tmp_path / "in").deferred_init), tmp_path / "out")
    assert not made_.round_trip.passed
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tensor_that_is_written_wrongly_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    published(tmp_path / "in")
    trained = initial_model(load_published(tmp_path / "in").deferred_init)
    usual = export_module._write_tensors

    def shifted(folder, slots, begins, stored, value) -> None:
        def moved(name: str) -> torch.Tensor:
            return value(name).roll(1) if "v_proj" in name else value(name)

        usual(folder, slots, begins, stored, moved)

    monkeypatch.setattr(export_module, "_write_tensors", shifted)
    assert not export_model(trained, tmp_path / "out").round_trip.passed


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path):
    published(tmp_path / "in")
    trained = initial_model(load_published(tmp_path / "in").deferred_init)
    with pytest.raises(PlanError, match="exists and is not an empty folder"):
        export_model(trained, tmp_path / "in")
    (tmp_path / "file").write_text("x")
    with pytest.raises(PlanError, match="cannot be written"):
        export_model(trained, tmp_path / "file" / "out")
    (tmp_path / "empty").mkdir()
    assert export_model(trained, tmp_path / "empty").round_trip.passed
    assert torch.equal(
        logits(made(load_published(tmp_path / "empty"))), logits(made(load_published(tmp_path / "in")))
    )
