"""One iteration of each loop of GRPO that is timed, with a tiny model."""

from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.generation.grpo_speed import VOCABULARY, build_ours, build_theirs
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def tiny() -> nn.Module:
    """A model of that vocabulary."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, max_position_embeddings=64))


@pytest.mark.parametrize("build", [build_ours, build_theirs])
def test_an_iteration_of_each_loop_runs(build: Any):
    with Ranks("loop", build, 2, store=fresh_store(), make=tiny) as ranks:
        for reward in ranks.step().notes:
            assert 0 <= reward < 0.1
