"""Published runs of models with experts: the sizes that rows leave out, and what each code base does.

A row states the number of experts, how many are chosen, and one FFN size. Shared experts, dense first layers,
the width of heads and latent attention are facts of the model, from its config.json on the Hugging Face hub.
What rows do not say about code:

    load          even, if the router is forced to balance, drops tokens, or runs on random tokens (NVIDIA's
                  recipes); else EXPERT_LOAD
    sent          once per host by DeepSeek and Megatron-Bridge since 25.11 (DeepEP, HybridEP); once per
                  chosen expert by all-to-all dispatchers before
    slices        Grok-1's recipes leave Megatron's default: experts are sliced over tensor ranks
    multi-token   Megatron-Bridge trains DeepSeek-V3 with a multi-token prediction, by its FLOPs: one more
    prediction    layer, and the head twice
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshwright.plan.sharding.expert_load import EXPERT_LOAD
from meshwright.planner.analytic.model_shape import ModelShape
from meshwright.planner.analytic.parallel_config import ExpertCosts, ParallelConfig

# sizes beside the columns of a row, by the first letters of the model's name
LATENT = {"q_rank": 1536, "kv_rank": 512, "head": 128, "rope_head": 64, "value_head": 128, "kv_heads": 0}
EXPERT_MODELS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("deepseek-v3", LATENT | {"ffn": 18432, "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": 3}),
    ("kimi-k2", LATENT | {"ffn": 18432, "expert_ffn": 2048, "shared_ffn": 2048, "dense_layers": 1}),
    (
        "deepseek-v2-lite",
        LATENT | {"q_rank": 0, "ffn": 10944, "expert_ffn": 1408, "shared_ffn": 2816, "dense_layers": 1},
    ),
    ("deepseek-v2", LATENT | {"ffn": 12288, "expert_ffn": 1536, "shared_ffn": 3072, "dense_layers": 1}),
    ("qwen3", {"head": 128}),
    ("qwen2-57b", {"expert_ffn": 2560, "shared_ffn": 20480}),
    ("gpt-oss", {"head": 64}),
)


def expert_layout(row: Mapping[str, str], layout: ParallelConfig, ep: int) -> ParallelConfig:
    """Returns `layout` with the experts of a row on `ep` ranks."""
    source, notes = row.get("source", ""), row.get("notes", "")
    is_even = any(word in notes for word in ("force", "tokendrop")) or source.startswith("NVIDIA")
    once_per_host = source.startswith(("DeepSeek", "Insights")) or (
        source.startswith("Megatron-Bridge") and "25.09" not in source
    )
    return replace(
        layout,
        ep=ep,
        expert_tp=layout.tp if "grok" in row.get("model", "").lower() else 1,
        expert_load=1.0 if is_even else EXPERT_LOAD,
        expert_costs=ExpertCosts(sends_per_expert=not once_per_host, sends_per_host=once_per_host),
    )


def expert_shape(row: Mapping[str, str], shape: ModelShape, experts: int, top_k: int) -> ModelShape:
    """Returns `shape`, read from the columns of a row, with the experts of its model."""
    name = shape.name.lower()
    sizes = next((sizes for prefix, sizes in EXPERT_MODELS if name.startswith(prefix)), {})
    found = replace(shape, gated=True, experts=experts, top_k=top_k, **sizes)
    is_bridge = row.get("source", "").startswith("Megatron-Bridge")
    if name.startswith("deepseek-v3") and is_bridge and "w/o MTP" not in row.get("notes", ""):
        return replace(found, layers=found.layers + 1, vocab=2 * found.vocab)
    return found
