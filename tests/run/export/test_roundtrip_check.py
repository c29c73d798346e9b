"""The round-trip check of an export: equal models pass, a change of one value does not."""

from math import nan
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from meshwright.model.loading.deferred_init import defer_init
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.model_config import ModelConfig
from meshwright.run.export.roundtrip_check import RoundTripResult, check_import, compare_logits, probe_inputs
from tests.model.published_models import FAMILIES, load_published, published


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_transformers_is_loaded_as_transformers_loads_it(tmp_path: Path, family: str):
    theirs = published(tmp_path, family)
    trip, numel = check_import(ModelConfig(str(tmp_path), weights=str(tmp_path)))
    assert trip.passed, str(trip)
    assert trip.tolerance <= 1e-5
    assert numel == theirs.num_parameters()


def test_one_changed_value_is_noticed(tmp_path: Path):
    published(tmp_path)
    print_ = load_published(tmp_path).deferred_init

    def wrong(name: str) -> torch.Tensor:
        value = print_.initial_value(name)
        return value + 1e-2 if name == "model.norm.weight" else value

    trip = compare_logits(print_, wrong, tmp_path)
    assert not trip.passed
    assert trip.max_difference > 1e-4


def test_nan_does_not_pass():
    assert not RoundTripResult("", nan, 1e-6).passed
    assert not RoundTripResult("", 2e-6, 1e-6).passed
    assert RoundTripResult("", 1e-6, 1e-6).passed


def test_images_are_compared_too(tmp_path: Path):
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    assert check_import(ModelConfig(str(tmp_path), weights=str(tmp_path)))[0].passed


def test_a_model_whose_inputs_cannot_be_guessed_is_compared_by_its_parameters(tmp_path: Path):
    config = transformers.WhisperConfig(
        **{
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
        },
        **{
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "vocab_size": 30,
            "num_mel_bins": 8,
            "max_source_positions": 10,
        },
        **{
            "max_target_positions": 10,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    print_ = load_published(tmp_path).deferred_init
    assert probe_inputs(print_.instantiate()) is None
    trip = compare_logits(print_, print_.initial_value, tmp_path)
    assert trip.description == "all parameters"
    assert trip.passed
    assert not compare_logits(print_, lambda name: print_.initial_value(name) + 1, tmp_path).passed


def test_a_model_of_anybody_cannot_be_compared_with_transformers(tmp_path: Path):
    (tmp_path / "net.py").write_text("from torch import nn\ndef net():\n    return nn.Linear(2, 3)\n")
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="which is not a transformers model"):
        check_import(ModelConfig(f"{tmp_path}/net.py:net", weights=str(tmp_path)))


def test_a_deferred_model_without_weights_is_compared_by_its_initial_values(tmp_path: Path):
    published(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    print_ = defer_init(lambda: transformers.LlamaForCausalLM(config), 0)
    assert not compare_logits(print_, print_.initial_value, tmp_path).passed
