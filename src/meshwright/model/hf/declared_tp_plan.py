"""Reads what a transformers model declares about itself: tensor-parallel plan, output head, attention.

Nothing here is needed to train a model; a module from elsewhere declares nothing. Classes are recognized by
their names, because importing the module that defines them takes two seconds.
"""

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from meshwright.model.hf.peft_name_map import is_adapted

# transformers' tensor-parallel styles -> our layer roles; an unknown style is shown unchanged
TP_STYLE_ROLES = {
    "colwise": "colwise",
    "colwise_gather_output": "colwise",
    "colwise_rep": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "packed_colwise": "packed_colwise",
    "packed_rowwise": "packed_rowwise",
    "embedding_rowwise": "vocab",
    "embedding_colwise": "colwise",
    "mla_kv_a_proj": "latent",
    "replicated_with_grad_allreduce": "replicated",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "experts",
    "grouped_gemm": "experts",
    "ep_dispatch_experts": "experts",
}


def is_transformers_model(module: nn.Module) -> bool:
    """Returns whether `module` is a model of transformers."""
    return "PreTrainedModel" in {kind.__name__ for kind in type(module).__mro__}


def config_of(module: nn.Module) -> Any:
    """Returns the transformers config of `module`, or of its base if it is adapted; None for other
    modules.
    """
    config = vars(_unwrap_adapters(module)).get("config")
    return config if "PreTrainedConfig" in {kind.__name__ for kind in type(config).__mro__} else None


def generation_model(module: nn.Module) -> Any:
    """Returns the transformers model that `module` is, or that it adapts; None for other modules."""
    bare = _unwrap_adapters(module)
    return bare if is_transformers_model(bare) else None


def declared_roles(module: nn.Module) -> dict[str, str]:
    """Returns the roles that the models inside `module` declare, by pattern of full names; outer models come
    first.

    A pattern in a config belongs to the base model; on the model with a head around it, it matches nothing.
    """
    found: dict[str, str] = {}
    for name, inner in module.named_modules():
        config = config_of(inner)
        if config is None or not is_transformers_model(inner):
            continue
        prefix = f"{name}." if name else ""
        for plan in (
            _class_mapping(type(inner), "_tp_plan"),
            _class_mapping(type(config), "base_model_tp_plan"),
        ):
            for pattern, style in plan.items():
                found.setdefault(f"{prefix}{pattern}", TP_STYLE_ROLES.get(style, style))
    return found


def output_head(module: nn.Module) -> nn.Module | None:
    """Returns the module that computes logits, if the model declares it."""
    bare: Any = _unwrap_adapters(module)
    return bare.get_output_embeddings() if is_transformers_model(bare) else None


def attention_implementation(module: nn.Module) -> str:
    """Returns the name of transformers' attention implementation if it can be exchanged; else ""."""
    config = config_of(module)
    kinds = {type(inner) for inner in module.modules() if is_transformers_model(inner)}
    exchanged = any(kind._supports_attention_backend for kind in cast(Any, kinds))
    return str(config._attn_implementation) if config is not None and exchanged else ""


def sdpa_advice(module: nn.Module, module_name: str) -> str:
    """Returns the advice for a part `module_name` that computes attention scores itself: use torch's
    attention.
    """
    inner = [
        each
        for at, each in module.named_modules()
        if is_transformers_model(each) and (not at or f"{module_name}.".startswith(f"{at}."))
    ]
    if not inner:
        return "call F.scaled_dot_product_attention"
    kind: Any = next(each for each in type(inner[-1]).__mro__ if each.__module__.startswith("transformers."))
    if not kind._supports_sdpa:
        return f"transformers' {kind.__name__} cannot attend by F.scaled_dot_product_attention"
    if config_of(inner[-1])._attn_implementation == "sdpa":
        return "it does so in addition to F.scaled_dot_product_attention, or where that is not possible"
    return "set attn_implementation = 'sdpa' in its config"


def _unwrap_adapters(module: nn.Module) -> nn.Module:
    return cast(Any, module).get_base_model() if is_adapted(module) else module


def _class_mapping(kind: type, name: str) -> Mapping[str, str]:
    found = next((vars(base)[name] for base in kind.__mro__ if vars(base).get(name)), None)
    return found if isinstance(found, Mapping) else {}
