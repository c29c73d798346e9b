"""Slices are tried on one block of each kind; the whole model runs where that does not tell."""

from unittest.mock import patch

import pytest
import torch
import transformers

import meshwright
from meshwright.model.trial import weight_slice_trial

SIZES = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 12, "num_layers": 2}
STARTS = {"decoder_start_token_id": 0, "pad_token_id": 0}
LLAMA = transformers.LlamaConfig(
    num_hidden_layers=3, vocab_size=32, num_attention_heads=2, hidden_size=8, intermediate_size=12
)


@pytest.mark.parametrize(
    ("config", "architecture", "num_forwards"),
    [
        (LLAMA, transformers.LlamaForCausalLM, 0),
        # its first block passes a table of the rank's heads on
        (transformers.T5Config(**SIZES, **STARTS), transformers.T5ForConditionalGeneration, 1),
    ],
)
def test_the_model_runs_on_slices_only_if_a_block_passes_slices_on(config, architecture, num_forwards):
    ids = torch.randint(3, 20, (2, 12))
    run = weight_slice_trial._find_failure
    with patch.object(weight_slice_trial, "_find_failure", side_effect=run) as whole:
        analyzed = meshwright.analyze(lambda: architecture(config), {"input_ids": ids, "labels": ids.clone()})
    assert whole.call_count == num_forwards
    roles = {call.role for call in analyzed.model_spec.layer_calls}
    assert {"colwise", "rowwise"} <= roles
