"""A small Llama whose sizes divide by nothing, for tests of tensor parallelism."""

from collections.abc import Sequence
from functools import cache

import torch
import transformers
from torch import nn

from meshwright.api import analyze, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}  # three groups of two heads
NUM_SAMPLES, TOKENS = 4, 9


def llama(**more: object) -> nn.Module:
    """With grouped-query attention; `more` are fields of its config."""
    config = transformers.LlamaConfig(**{**SIZES, **HEADS, "use_cache": False, **more})
    return transformers.LlamaForCausalLM(config)


def batches(count: int, samples: int = NUM_SAMPLES, length: int = TOKENS) -> list[dict[str, torch.Tensor]]:
    """Global batches of random tokens, so many of them in a row."""
    generator = torch.Generator().manual_seed(0)

    def tokens() -> torch.Tensor:
        return torch.randint(0, SIZES["vocab_size"], (samples, length), generator=generator)

    return [{"input_ids": tokens(), "labels": tokens()} for _ in range(count)]


@cache
def analyzed_llama(length: int = TOKENS, **more: object) -> AnalyzedModel:
    """The analyzed model of `llama(**more)` on sequences of `length` tokens; cached, because it takes as long
    as three training steps.

    The weights are the same in every run: AdamW's first step has the sign of each gradient, whose rounding
    may decide it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(llama(**more), batches(1, length=length)[0], loss=token_cross_entropy())


def planned(
    model: nn.Module | AnalyzedModel,
    mesh: Mesh,
    strategies: Sequence[Strategy] | None = None,
    micro: int = 0,
    samples: int = NUM_SAMPLES,
    length: int = TOKENS,
    **job: object,
) -> tuple[AnalyzedModel, Plan]:
    """The analyzed model of `model`, and its plan on `mesh` with clipping and weight decay."""
    analyzed = analyze(model, batches(1, samples, length)[0], loss=token_cross_entropy())
    train, optimizer = (
        TrainConfig(batch=samples, clip=0.5),
        OptimizerConfig("adamw", lr=0.1, weight_decay=0.1),
    )
    said = Job(ModelConfig("llama"), DataConfig("random", sequence=length), train, optimizer, **job)
    return analyzed, make_plan(analyzed, said, mesh, strategies, micro)
