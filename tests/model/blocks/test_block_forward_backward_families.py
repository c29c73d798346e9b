"""Unmodified transformers models: gradients block by block equal those of one backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.model.block_backward import both_ways

TOKENS = torch.arange(22).view(2, 11) * 7 % 61
TEXT = {"input_ids": TOKENS}
PAIRS = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :5]}
PADDED = {"input_ids": TOKENS, "attention_mask": torch.tensor([[1] * 11, [1] * 9 + [0] * 2])}
COMMON = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
WIDE = {**COMMON, "intermediate_size": 24}
CAUSAL = {
    "llama with grouped queries": ("Llama", {**WIDE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {**WIDE, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma2 with a sliding window": (
        "Gemma2",
        {**WIDE, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4},
    ),
    "phi3": ("Phi3", {**WIDE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "gpt-neox with parallel branches": ("GPTNeoX", WIDE),
    "falcon": ("Falcon", {**COMMON, "multi_query": True}),
    "opt": ("OPT", {**COMMON, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
}


def build(family: str, head: str, sizes: dict[str, Any]) -> Callable[[], nn.Module]:
    config = getattr(transformers, f"{family}Config")(**sizes)
    return lambda: getattr(transformers, f"{family}{head}")(config)


@pytest.mark.parametrize("name", CAUSAL)
def test_gradients_of_a_causal_language_model_are_those_of_one_backward(name: str):
    family, sizes = CAUSAL[name]
    driven = both_ways(build(family, "ForCausalLM", sizes), PADDED, total=lambda out: out.logits.sin().sum())
    assert driven.error < 1e-14
    assert driven.in_glue == []
    layers = [block_call for block_call in driven.block_calls if block_call.split(".")[-1].isdigit()]
    assert len(layers) == 2
    assert tuple(driven.block_calls) == driven.analyzed.model_spec.block_calls
    assert driven.analyzed.model_spec.notes == ()


def test_a_tied_head_is_one_parameter_of_two_block_calls():
    sizes = {
        "vocab_size": 61,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }
    sizes |= {"use_cache": False}
    driven = both_ways(
        build("GPT2", "LMHeadModel", sizes), {"input_ids": TOKENS}, total=lambda out: out.logits.sin().sum()
    )
    tied = driven.analyzed.model_spec.params[0]
    assert (tied.name, tied.block_calls) == ("transformer.wte.weight", ("transformer.wte", "lm_head"))
    assert tied.aliases == ("lm_head.weight",)
    assert driven.error < 1e-14


def test_bert_with_a_masked_language_head():
    sizes = {**WIDE, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    driven = both_ways(build("Bert", "ForMaskedLM", sizes), PADDED, total=lambda out: out.logits.sin().sum())
    assert driven.error < 1e-14
    assert "bert.encoder.layer.1" in driven.block_calls
    assert driven.in_glue == []


def test_vit_with_a_class_head():
    sizes = {**WIDE, "image_size": 8, "patch_size": 4}
    image = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)}
    driven = both_ways(
        build("ViT", "ForImageClassification", sizes), image, total=lambda out: out.logits.sin().sum()
    )
    assert driven.error < 1e-14
    assert len([block_call for block_call in driven.block_calls if block_call.split(".")[-1].isdigit()]) == 2


def test_t5_uses_its_shared_embedding_in_three_block_calls():
    sizes = {
        "vocab_size": 61,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    sizes |= {"use_cache": False}
    driven = both_ways(
        build("T5", "ForConditionalGeneration", sizes), PAIRS, total=lambda out: out.logits.sin().sum()
    )
    assert driven.error < 1e-14
    shared = driven.analyzed.model_spec.params[0]
    assert shared.name == "shared.weight"
    assert shared.block_calls == ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")


def test_bart_hands_the_end_of_its_encoder_to_every_layer_of_its_decoder():
    sizes = {
        "vocab_size": 61,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
    }
    sizes |= {
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "dropout": 0.0,
        "use_cache": False,
    }
    driven = both_ways(
        build("Bart", "ForConditionalGeneration", sizes), PAIRS, total=lambda out: out.logits.sin().sum()
    )
    assert driven.error < 1e-14
    assert driven.analyzed.model_spec.params[0].block_calls == (
        "model.encoder.embed_tokens",
        "model.decoder.embed_tokens",
        "lm_head",
    )
    assert driven.in_glue == []
