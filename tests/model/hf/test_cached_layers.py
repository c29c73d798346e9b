"""A trial finds what each layer caches of a sequence."""

import logging
from typing import Any

import pytest
import torch
import transformers

from meshwright.api import analyze
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer
from tests.parallel.tensor.odd_llama import HEADS, SIZES, analyzed_llama, batches


def layers_of(model: Any) -> tuple[CachedLayer, ...] | None:
    return analyze(model, batches(1)[0]).cached_layers


def test_keys_and_values_of_groups_of_heads_and_of_a_window():
    config = transformers.Gemma2Config(**SIZES, **HEADS, head_dim=8, sliding_window=5)
    first, second = layers_of(transformers.Gemma2ForCausalLM(config)) or ()
    assert first == CachedLayer("model.layers.0", num_heads=3, per_token_numel=2 * 3 * 8, window=5)
    assert second == CachedLayer("model.layers.1", num_heads=3, per_token_numel=2 * 3 * 8)


def test_recurrent_states_do_not_grow():
    sizes = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "conv_kernel": 3}
    (layer,) = layers_of(transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, expand=2))) or ()
    assert layer.per_token_numel == 0
    assert [numel for numel, _ in layer.states] == [2 * 16 * 3, 2 * 16 * 4]


def test_a_module_that_is_no_transformers_model_caches_nothing():
    embedding = torch.nn.Embedding(67, 8)

    class Bare(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = embedding, torch.nn.Linear(8, 67)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    assert layers_of(Bare()) == ()


def test_a_forward_that_fails_is_said_and_nothing_is_known(monkeypatch, caplog: pytest.LogCaptureFixture):
    analyzed = analyzed_llama(num_hidden_layers=1)
    vars(analyzed).pop("cached_layers", None)

    def fail(*given: object, **named: object) -> None:
        raise ValueError("no images\nmore")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fail)
    with caplog.at_level(logging.WARNING):
        assert analyzed.cached_layers is None
    vars(analyzed).pop("cached_layers")
    text = "what LlamaForCausalLM caches of a sequence is not known: ValueError: no images"
    assert [record.getMessage() for record in caplog.records] == [text]
