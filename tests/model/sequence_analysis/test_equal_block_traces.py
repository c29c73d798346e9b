"""Block calls that equal an earlier one are not traced, and what is found is what a trace of each finds."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers

import meshwright
from meshwright.model.sequence_analysis.block_trace import BlockTrace

SIZES = {"num_hidden_layers": 3, "vocab_size": 32, "num_attention_heads": 2, "hidden_size": 8}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=12)
GPT2 = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=32)
CONFIGS = {
    "llama": (LLAMA, transformers.LlamaForCausalLM),
    "gpt2": (GPT2, transformers.GPT2LMHeadModel),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_sequence_dims_are_those_of_a_trace_of_every_block(name):
    config, architecture = CONFIGS[name]
    ids = torch.randint(3, 20, (2, 12))
    analyzed = meshwright.analyze(lambda: architecture(config), {"input_ids": ids, "labels": ids.clone()})
    assert len(analyzed.equal_block_calls) == 2
    repeat = BlockTrace._repeat_block
    with patch.object(BlockTrace, "_repeat_block", autospec=True, side_effect=repeat) as repeated:
        found = analyzed.sequence_info
    assert repeated.call_count % 2 == 0
    assert repeated.call_count > 0
    assert found == replace(analyzed, equal_block_calls={}).sequence_info
