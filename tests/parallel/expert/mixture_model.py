"""Small mixtures of experts of transformers, batches for them, and a router that ignores its input."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn

import meshwright as mw

VOCABULARY, TOKENS = 80, 7
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64},
}


def mixtral(num_experts: int = 5, choice: Sequence[int] = ()) -> nn.Module:
    """A Mixtral of which each token chooses 2 experts: those of `choice`, if it is given."""
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=num_experts, num_experts_per_tok=2, attn_implementation="sdpa"
    )
    model = transformers.MixtralForCausalLM(config)
    for layer in model.model.layers if choice else ():
        layer.mlp.gate.forward = partial(_fixed_choice, layer.mlp.gate, tuple(choice))
    return model


def _fixed_choice(router: Any, choice: tuple[int, ...], hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    weights = logits[:, list(choice)].softmax(-1)
    index = torch.tensor(choice, device=hidden.device).expand(len(weights), -1)
    return logits, weights, index


@cache
def analyzed_mixtral(num_experts: int = 5, choice: tuple[int, ...] = ()) -> mw.AnalyzedModel:
    """The analysis of `mixtral(num_experts, choice)`."""
    return mw.analyze(partial(mixtral, num_experts, choice), batch_of(4))


def gpt_oss() -> nn.Module:
    """A gpt-oss with 5 experts: with biases, and gates and ups in turn."""
    config = transformers.GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=5,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default"},
    )
    return transformers.GptOssForCausalLM(config)


@cache
def analyzed_gpt_oss() -> mw.AnalyzedModel:
    """The analysis of `gpt_oss`."""
    return mw.analyze(gpt_oss, batch_of(4))


@cache
def analyzed_deepseek() -> mw.AnalyzedModel:
    """The analysis of a DeepSeek-V3 with 5 experts and a shared one in its second layer."""
    config = transformers.DeepseekV3Config(
        **SIZES,
        **{"n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        **{"moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    )
    return mw.analyze(partial(transformers.DeepseekV3ForCausalLM, config), batch_of(4))


def batch_of(num_samples: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens with labels, of which some do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (num_samples, TOKENS), generator=generator)
    labels = ids.clone()
    labels[1::3, :4] = -100
    return {"input_ids": ids, "labels": labels}


def sgd_job(batch: int = 12, **train: object) -> mw.Job:
    """A job with SGD."""
    return mw.Job(
        train=mw.TrainConfig(steps=2, batch=batch, **train),
        optimizer=mw.OptimizerConfig(name="sgd", lr=0.1),
    )


def assert_equals_one_device(
    mesh: mw.Mesh, strategies: Sequence[mw.Strategy] | None, micro_batch: int
) -> None:
    """Verifies a plan of two clipped steps of the Mixtral."""
    analyzed = analyzed_mixtral()
    plan = mw.make_plan(analyzed, sgd_job(clip=0.5), mesh, strategies, micro_batch)
    verdict = mw.verify(analyzed, plan, [batch_of(12), batch_of(12, 1)])
    assert verdict.passed, str(verdict)


def expert_strategies(*more: mw.Strategy, over: tuple[str, ...] = ("ep",)) -> tuple[mw.Strategy, ...]:
    """Expert parallelism `over` these axes with DDP along dp_shard, and `more`."""
    of_samples = [axis for axis in ("ep", "dp_shard") if axis in (*over, "dp_shard")]
    splits = (*map(mw.BatchSplit, of_samples), *((mw.RingAttention(),) if "cp" in over else ()))
    stores = any(isinstance(each, (mw.DDP, mw.NaiveDDP, mw.ZeRO)) for each in more)
    return (mw.ExpertParallel(over), *splits, *more, *(() if stores else (mw.DDP(axis="dp_shard"),)))
