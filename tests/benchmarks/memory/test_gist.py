"""The benchmark at a small size: the saved bytes are those of the counted values, to the byte."""

import pytest
import torch
import transformers

from benchmarks.memory import gist


def _model() -> torch.nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, use_cache=False)
    return transformers.OPTForCausalLM(config)


def test_saved_bytes_are_those_of_the_values(monkeypatch: pytest.MonkeyPatch):
    tokens = torch.arange(20).view(4, 5) % 50
    monkeypatch.setitem(vars(gist)["MODELS"], "small", (_model, {"input_ids": tokens, "labels": tokens + 1}))
    row = gist.measure_model("small", gist.QUICK)
    assert row.same_bits
    assert row.saved == row.expected > 0


def test_llama_is_refused():
    assert "it saves 0 bytes" in gist.refusal("Llama")
