"""Parity of mixtures of experts of transformers, unmodified, under plans with distributed experts.

They equal one device in float64 after two steps of SGD, to 1e-10.


    families   Mixtral, Qwen2-MoE and Qwen3-MoE, OLMoE, DeepSeek-V3, gpt-oss (biases, interleaved gates),
               GLM-4-MoE, Ernie 4.5 MoE; five experts, so that 2 and 3 ranks have uneven numbers
    plans      ep alone and with 3 microbatches; with DDP, ZeRO-1, 2 and 3, HSDP; tensor and context
               parallelism; pipelines (1F1B, ZB-V); recomputation; the matrices of each expert sliced along
               tp, alone and with ep; experts over dp_shard, cp and tp, alone and together

The error is the largest difference of any gradient, parameter, loss or norm, relative to the largest number
in its block. Each case compares the bytes of all collectives with the plan, too. A plan that is refused is a
miss; its message stands in the result.

    python -m benchmarks.experts.expert_parity                    all cases; ten minutes on two cores
    python -m benchmarks.experts.expert_parity --only "gpt-oss"   those with this in their name; no result
"""

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks.harness.result import Result
from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.expert.expert_parallel import ExpertParallel
from meshwright.parallel.expert.expert_tensor_parallel import ExpertTensorParallel
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.tensor.megatron_1d import TensorParallel
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, OptimizerConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy

NAME, TOLERANCE, NUM_STEPS, BATCH, TOKENS = "expert_parity", 1e-10, 2, 12, 9
CLAIM = (
    "unmodified mixtures of experts of transformers (8 families), with experts distributed over 2 and 3 "
    "ranks in uneven numbers, equal one device to 1e-10 in float64: alone, with DDP, ZeRO-1, 2 and 3, HSDP, "
    "tensor, context and pipeline parallelism, recomputation, 3 microbatches, and slices of each expert"
)
SIZES: Mapping[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
HEADS: Mapping[str, Any] = {**SIZES, "head_dim": 6}
INNER: Mapping[str, Any] = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
LATENT: Mapping[str, Any] = {
    **{**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3},
    **{"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 6, "v_head_dim": 6},
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Mixtral": ("Mixtral", {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", {**HEADS, **INNER, "num_experts": 5, "shared_expert_intermediate_size": 16}),
    "Qwen3-MoE": ("Qwen3Moe", {**HEADS, **INNER, "num_experts": 5}),
    "OLMoE": ("Olmoe", {**SIZES, "num_experts": 5, "num_experts_per_tok": 3}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {**LATENT, **INNER, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "gpt-oss": ("GptOss", {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}),
    "GLM-4-MoE": (
        "Glm4Moe",
        {**HEADS, **INNER, "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "Ernie 4.5 MoE": (
        "Ernie4_5_Moe",
        {
            **SIZES,
            **{"moe_intermediate_size": 12, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1},
            "moe_layer_start_index": 1,
        },
    ),
}
SHARDED = BatchSplit("dp_shard")
EXPERTS = (ExpertParallel(), BatchSplit("ep"), SHARDED)
SLICED = (ExpertTensorParallel(),)
Case = tuple[Mesh, tuple[Strategy, ...] | None, int]  # the mesh, strategies (None: the default), micro_batch
PLANS: Mapping[str, Case] = {
    "ep 2": (Mesh(ep=2), (*EXPERTS, DDP("dp_shard")), 0),
    "ep x dp, 3 microbatches": (Mesh(ep=2, dp_shard=2), (*EXPERTS, DDP("dp_shard")), 1),
    "ep 3, recomputed": (Mesh(ep=3), (*EXPERTS, DDP("dp_shard"), ActivationCheckpointing()), 2),
    "ZeRO-1": (Mesh(ep=3, dp_shard=2), (*EXPERTS, ZeRO(stage=1)), 1),
    "ZeRO-2": (Mesh(ep=2, dp_shard=3), (*EXPERTS, ZeRO(stage=2)), 1),
    "ZeRO-3, recomputed": (Mesh(ep=2, dp_shard=3), (*EXPERTS, ZeRO(), ActivationCheckpointing()), 0),
    "HSDP": (
        Mesh(ep=3, dp_shard=2, dp_replicate=2),
        (*EXPERTS, BatchSplit(), ZeRO(replicate_axis="dp_replicate")),
        0,
    ),
    "tp 2": (Mesh(ep=3, tp=2), None, 2),
    "sliced along tp 2, with tensor_parallel": (Mesh(tp=2), (*SLICED, TensorParallel()), 4),
    "sliced along tp 3": (Mesh(tp=3), SLICED, 0),
    "ep 3, sliced along tp 2": (Mesh(ep=3, tp=2), (*SLICED, *EXPERTS, DDP("dp_shard")), 2),
    "ep 2, sliced along tp 3, ZeRO-3, recomputed": (
        Mesh(ep=2, dp_shard=2, tp=3),
        (*EXPERTS, *SLICED, ZeRO(), ActivationCheckpointing()),
        1,
    ),
    "ZB-V, sliced along tp 2": (
        Mesh(ep=2, pp=2, tp=2),
        (*EXPERTS, *SLICED, DDP("dp_shard"), Pipeline(schedule="zb_v")),
        3,
    ),
    "cp 3": (Mesh(ep=2, cp=3), None, 0),
    "over dp_shard, ZeRO-1": (Mesh(dp_shard=3), (ExpertParallel(("dp_shard",)), SHARDED, ZeRO(stage=1)), 2),
    "over dp_shard, HSDP, recomputed": (
        Mesh(dp_shard=2, dp_replicate=2),
        (
            *(ExpertParallel(("dp_shard",)), SHARDED, BatchSplit(), ActivationCheckpointing()),
            ZeRO(replicate_axis="dp_replicate"),
        ),
        1,
    ),
    "over dp_shard, 1F1B": (
        Mesh(dp_shard=3, pp=2),
        (ExpertParallel(("dp_shard",)), SHARDED, ZeRO(stage=2), Pipeline()),
        1,
    ),
    "over cp": (Mesh(cp=3), (ExpertParallel(("cp",)), RingAttention(), DDP("cp")), 4),
    "over dp_shard and cp, ZeRO-3": (
        Mesh(dp_shard=2, cp=2),
        (ExpertParallel(("dp_shard", "cp")), SHARDED, RingAttention(), ZeRO()),
        2,
    ),
    "over tp, with tensor_parallel": (Mesh(tp=2), (ExpertParallel(("tp",)), TensorParallel()), 4),
    "over tp 3, ZB-V": (Mesh(tp=3, pp=2), (ExpertParallel(("tp",)), Pipeline(schedule="zb_v")), 3),
    "over ep and tp": (
        Mesh(ep=2, tp=2),
        (ExpertParallel(("ep", "tp")), *EXPERTS[1:], DDP("dp_shard")),
        2,
    ),
    "1F1B": (Mesh(ep=3, pp=2), None, 1),
    "ZB-V": (
        Mesh(ep=2, pp=2),
        (*EXPERTS, DDP("dp_shard"), Pipeline(schedule="zb_v")),
        2,
    ),
}


@dataclass(frozen=True)
class Row:
    """The outcome of a case: the largest error, or why there is none; `refused` by the plan itself."""

    error: float
    message: str = ""
    refused: bool = False


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns a global batch of random tokens; some labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (BATCH, TOKENS), generator=generator)
    labels = ids.clone()
    labels[2::5, :4] = -100
    return {"input_ids": ids, "labels": labels}


@cache
def analyzed_family(family: str) -> AnalyzedModel:
    """Returns the analysis of a family's model."""
    return analyze(partial(_build, *FAMILIES[family]), batch())


def _build(architecture: str, fields: Mapping[str, Any]) -> nn.Module:
    kind = getattr(transformers, f"{architecture}ForCausalLM")
    return kind(kind.config_class(**fields))


def run(family: str, plan: str) -> Row:
    """Returns the outcome of one case."""
    mesh, strategies, micro_batch = PLANS[plan]
    job = Job(
        train=TrainConfig(steps=NUM_STEPS, batch=BATCH, clip=0.5), optimizer=OptimizerConfig("sgd", lr=0.1)
    )
    try:
        made = make_plan(analyzed_family(family), job, mesh, strategies, micro_batch)
    except PlanError as error:
        return Row(0.0, str(error), refused=True)
    verdict = verify(analyzed_family(family), made, [batch(seed) for seed in range(NUM_STEPS)])
    return Row(max(verdict.max_errors.values()), "" if verdict.passed else str(verdict))


def cases() -> Iterator[tuple[str, str]]:
    """Yields all cases."""
    yield from ((family, plan) for family in FAMILIES for plan in PLANS)


def main() -> None:
    """Run the cases and write the result."""
    parser = ArgumentParser()
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows = {}
    for family, plan in cases():
        if only in (name := f"{family}, {plan}"):
            rows[name] = run(family, plan)
            print(f"{name}: {rows[name].error:.1e} {rows[name].message[:300]}", flush=True)
    equal = {name: row.error for name, row in rows.items() if not row.message}
    if only:
        return
    result = Result.of(
        NAME,
        CLAIM,
        values=list(equal.values()),
        median=float(len(equal)),
        spread=(min(equal.values()), max(equal.values())),
        bar=TOLERANCE,
        holds=not any(row.message and not row.refused for row in rows.values()),
        repeats=1,
        detail={
            "cases": len(rows),
            "equal": len(equal),
            "refused": {name: row.message for name, row in rows.items() if row.refused},
            "wrong": {name: row.message for name, row in rows.items() if row.message and not row.refused},
        },
    )
    print(result.write(NAME))


if __name__ == "__main__":
    main()
