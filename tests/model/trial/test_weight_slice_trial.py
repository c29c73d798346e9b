"""Slices are tried on one block of each kind; the whole model runs where that does not tell."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn

import meshwright
from meshwright.model.trial import weight_slice_trial

SIZES = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "num_heads": 2, "d_ff": 12, "num_layers": 2}
STARTS = {"decoder_start_token_id": 0, "pad_token_id": 0}
LLAMA = transformers.LlamaConfig(
    num_hidden_layers=3, vocab_size=32, num_attention_heads=2, hidden_size=8, intermediate_size=12
)


def build_t5() -> nn.Module:
    """A T5, whose first blocks pass tables of the rank's heads to the next ones."""
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES, **STARTS))


def build_t5_with_glue() -> nn.Module:
    module = build_t5()
    module.encoder.block[0].register_forward_hook(lambda block, args, out: (out[0], out[1] * 1.0, *out[2:]))
    return module


@pytest.mark.parametrize(
    ("build", "num_forwards"),
    [
        (lambda: transformers.LlamaForCausalLM(LLAMA), 0),
        (build_t5, 0),
        (build_t5_with_glue, 1),
    ],
    ids=["llama", "slices go from block to block", "glue computes with slices"],
)
def test_the_model_runs_on_slices_only_if_glue_takes_slices(
    build: Callable[[], nn.Module], num_forwards: int
):
    ids = torch.randint(3, 20, (2, 12))
    run = weight_slice_trial._find_failure
    with patch.object(weight_slice_trial, "_find_failure", side_effect=run) as whole:
        analyzed = meshwright.analyze(build, {"input_ids": ids, "labels": ids.clone()})
    assert whole.call_count == num_forwards
    roles = {call.role for call in analyzed.model_spec.layer_calls}
    assert {"colwise", "rowwise"} <= roles
