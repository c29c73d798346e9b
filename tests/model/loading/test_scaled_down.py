"""A scaled-down copy of a config: the same architecture, small, and its sizes still fit each other."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.model.analysis.analyze import analyze
from meshwright.model.loading.loader import load_model
from meshwright.model.loading.scaled_down import scale_down
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from tests.model.unknown_loss import unknown_loss

COMMON = {
    "vocab_size": 97,
    "hidden_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 24,
    "intermediate_size": 1024,
}
FACTORS = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 16, "short_factor": [1.0] * 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **COMMON, "num_key_value_heads": 8},
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        **COMMON,
        "head_dim": 64,
        "layer_types": ["full_attention"] * 5,
    },
    "GPT2LMHeadModel": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 768, "n_layer": 5, "n_head": 12},
    "FalconForCausalLM": {
        "model_type": "falcon",
        **COMMON,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        **COMMON,
        "ffn_dim": 1024,
        "word_embed_proj_dim": 512,
        "max_position_embeddings": 96,
    },
    "PhiForCausalLM": {"model_type": "phi", **COMMON, "partial_rotary_factor": 0.4},
    "Phi3ForCausalLM": {"model_type": "phi3", **COMMON, "rope_parameters": FACTORS, "pad_token_id": 0},
    "GPTJForCausalLM": {
        "model_type": "gptj",
        "vocab_size": 97,
        "n_embd": 768,
        "n_layer": 5,
        "n_head": 12,
        "rotary_dim": 32,
    },
    "BartForConditionalGeneration": {
        "model_type": "bart",
        "vocab_size": 97,
        "d_model": 768,
        "max_position_embeddings": 96,
    },
    "T5ForConditionalGeneration": {"model_type": "t5", "vocab_size": 97, "num_decoder_layers": 6},
    "MixtralForCausalLM": {"model_type": "mixtral", **COMMON, "num_key_value_heads": 8},
    "DeepseekV3ForCausalLM": {
        "model_type": "deepseek_v3",
        **COMMON,
        "n_routed_experts": 16,
        "moe_intermediate_size": 64,
    },
}


def job_of(tmp_path: Path, config: dict[str, Any], **overrides: int) -> Job:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return Job(
        ModelConfig(str(path), overrides), DataConfig("text", sequence=512), TrainConfig(steps=3, batch=6)
    )


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_copy_has_two_layers_runs_and_is_small(architecture: str, tmp_path: Path):
    job = scale_down(job_of(tmp_path, {**CONFIGS[architecture], "architectures": [architecture]}))
    ids = torch.arange(job.data.sequence).view(1, -1) % 97
    example = {"input_ids": ids, "labels": ids}
    if "Conditional" in architecture:
        example["decoder_input_ids"] = ids[:, :7]
    model_spec = analyze(load_model(job.model, 0), example, unknown_loss("labels")).model_spec
    layers = [block_call for block_call in model_spec.block_calls if block_call.split(".")[-1].isdigit()]
    assert len(layers) == (4 if "Conditional" in architecture else 2)
    assert model_spec.numel < 500_000


def test_what_groups_heads_and_what_the_user_set_stay(tmp_path: Path):
    job = job_of(
        tmp_path, {**CONFIGS["LlamaForCausalLM"], "architectures": ["LlamaForCausalLM"]}, vocab_size=61
    )
    small = scale_down(job)
    assert small.model.overrides == {
        "vocab_size": 61,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "intermediate_size": 192,
        "head_dim": 16,
    }
    assert small.data.sequence == 48
    talks = replace(job, data=replace(job.data, chat="messages", tokenizer="t"))
    assert scale_down(talks).data == talks.data, "conversations that are cut short may hold no answer"
    assert (small.train, small.optimizer, small.model.source) == (job.train, job.optimizer, job.model.source)


def test_models_that_cannot_be_scaled_down_are_refused(tmp_path: Path):
    with pytest.raises(
        PlanError, match=r"^--shrink: a model from a factory cannot be scaled down(?s:.*)second factory"
    ):
        scale_down(Job(ModelConfig("train.py:build")))
    text = {"model_type": "llama", **COMMON}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    composite = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(
        PlanError, match=r"^--shrink: the fields for sizes in a llava config are unknown(?s:.*)smaller config"
    ):
        scale_down(job_of(tmp_path, {**composite, "text_config": text, "vision_config": vision}))
