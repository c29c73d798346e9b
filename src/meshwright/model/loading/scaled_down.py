"""Scales a transformers model down: the same architecture and code, at a size that verifies in seconds.

Sizes are found by transformers' field names. Counts shrink to the least that still shows an error (two
layers, four heads), widths follow from them, and what divides another size still does. The vocabulary stays,
because the data is tokenized with it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshwright.model.loading.loader import load_model
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job

NUM_LAYERS, NUM_HEADS, HEAD_WIDTH, NUM_EXPERTS, SEQUENCE_LENGTH = 2, 4, 16, 4, 48
# Each size with all its field names; transformers' own aliases (n_layer, d_model...) are added.
SIZE_FIELDS = {
    "layers": ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
    "heads": ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "width": ("hidden_size",),
    "inner": ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"),
    "expert_inner": ("moe_intermediate_size", "shared_expert_intermediate_size"),
    "head_width": ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "rotary": ("rotary_dim",),
    "rank": ("q_lora_rank", "kv_lora_rank"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"),
    "projected": ("word_embed_proj_dim",),
}


def scale_down(job: Job) -> Job:
    """Returns `job` with a model of 2 layers, at most 4 heads of width 16, and samples of at most 48 tokens.

    Everything else is unchanged, and so is the length of conversations. Raises PlanError for a model from a
    factory (only its author knows its sizes), and for a config that is composed of several others.
    """
    if ".py" in job.model.source:
        fix = "write a second factory with smaller sizes, and verify that"
        raise PlanError("a model from a factory cannot be scaled down", fix=fix, location="--shrink")
    config: Any = load_model(job.model, job.train.seed).deferred_init.instantiate().config
    fields = config.to_dict()
    current = fields | {alias: fields.get(name) for alias, name in config.attribute_map.items()}
    sizes = dict(_sizes(current))
    scaled_fields = {
        name: sizes[size]
        for size, names in SIZE_FIELDS.items()
        for name in names
        if _is_size(current.get(name))
    }
    if "hidden_size" not in scaled_fields or "num_hidden_layers" not in scaled_fields:
        text = f"the fields for sizes in a {config.model_type} config are unknown"
        raise PlanError(text, fix="write a smaller config, and verify that", location="--shrink")
    conversations = [
        part.chat for part in (job.data, *job.data.mixture) if part.chat
    ]  # truncated, they would hold no answer
    data = job.data if conversations else replace(job.data, sequence=min(job.data.sequence, SEQUENCE_LENGTH))
    model = replace(
        job.model, overrides={**job.model.overrides, **scaled_fields}, weights="", skip=()
    )  # the weights no longer fit
    return replace(job, model=model, data=data)


def _sizes(config_fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    num_heads = next(
        (config_fields[name] for name in SIZE_FIELDS["heads"] if _is_size(config_fields.get(name))), NUM_HEADS
    )
    num_kv_heads = next(
        (config_fields[name] for name in SIZE_FIELDS["kv_heads"] if _is_size(config_fields.get(name))),
        num_heads,
    )
    heads = min(NUM_HEADS, num_heads)
    head_width = _head_width(config_fields, num_heads)
    width = heads * head_width
    yield "layers", NUM_LAYERS
    yield "heads", heads
    yield "kv_heads", max(1, heads // max(1, num_heads // num_kv_heads))
    yield "width", width
    yield "inner", 3 * width
    yield "expert_inner", width
    yield "head_width", head_width
    yield "rotary", head_width // 2
    yield "rank", head_width
    yield "experts", NUM_EXPERTS
    yield "chosen", 1 if config_fields.get("num_experts_per_tok") == 1 or "n_group" in config_fields else 2
    yield (
        "projected",
        width if config_fields.get("word_embed_proj_dim") == config_fields.get("hidden_size") else width // 2,
    )


def _head_width(config_fields: Mapping[str, Any], num_heads: int) -> int:
    # a config that lists a factor for every rotary frequency (long context) keeps its head width
    rope = config_fields.get("rope_parameters") or {}
    if not any(isinstance(value, list) for value in rope.values()):
        return HEAD_WIDTH
    width = config_fields.get("hidden_size")
    return config_fields.get("head_dim") or (width // num_heads if isinstance(width, int) else HEAD_WIDTH)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
