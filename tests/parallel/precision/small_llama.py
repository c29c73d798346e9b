"""A Llama of which all linear layers have sizes that are multiples of 16, and its batches."""

from collections.abc import Sequence
from functools import cache

import torch
import transformers
from torch import nn

from meshwright.api import analyze, default_strategies, make_plan
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.job import Job, OptimizerConfig, PrecisionConfig, TrainConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

VOCABULARY, TOKENS, SAMPLES = 67, 9, 12
FLOAT32, AUTOCAST = PrecisionConfig(), PrecisionConfig(compute="bfloat16")
SGD = OptimizerConfig("sgd", lr=0.1, weight_decay=0.0)
BF16 = PrecisionConfig("bfloat16", "bfloat16", master="float32")


def llama(**more: object) -> nn.Module:
    """With grouped-query attention and biases in it; `more` are fields of its config."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}
    config = transformers.LlamaConfig(**{**sizes, **heads, "use_cache": False, **more})
    return transformers.LlamaForCausalLM(config)


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    """Global batches of random tokens, so many of them in a row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, SAMPLES, TOKENS + 1), generator=generator)
    return [{"input_ids": each[:, :-1].contiguous(), "labels": each[:, 1:].contiguous()} for each in tokens]


@cache
def analyzed_llama(**more: object) -> AnalyzedModel:
    """The analyzed model; cached, because nothing writes into it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return analyze(llama(**more), batches(1)[0], loss=token_cross_entropy())


def plan_of(
    mesh: Mesh,
    *more: Strategy,
    strategies: Sequence[Strategy] | None = None,
    micro_batch: int = 0,
    precision: PrecisionConfig = FLOAT32,
    optimizer: OptimizerConfig = SGD,
    analyzed: AnalyzedModel | None = None,
) -> Plan:
    """A plan with `more` beside the strategies of the mesh, or beside `strategies`."""
    analyzed = analyzed or analyzed_llama()
    job = Job(
        train=TrainConfig(steps=50, batch=SAMPLES, clip=0.0),
        optimizer=optimizer,
        precision=precision,
    )
    beside = default_strategies(mesh, analyzed.model_spec) if strategies is None else strategies
    return make_plan(analyzed, job, mesh, (*beside, *more), micro_batch)
