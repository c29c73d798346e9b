"""The sizes of MODEL for a search: given as text, or read from a transformers config.

The model of a config is made without weights, to count its parameters. The search covers decoders of equal
layers; a model whose parameter count does not match its sizes is reported. Configs do not say whether an MLP
is gated; the count decides. Experts are read from the config, and the layers that have them from the matrices
[experts, ...] of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.model.hf.declared_tp_plan import config_of
from meshwright.model.hf.hub import is_hub_id
from meshwright.model.loading.loader import load_model, read_source_config
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.job.model_config import ModelConfig
from meshwright.planner.analytic.model_shape import SHAPE_FORMAT, ModelShape, parse_shape

# names of sizes in transformers configs; families with other names map them (attribute_map)
HF_CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "sequence": "max_position_embeddings",
}

EXPERT_KEYS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
)  # names of their number in configs
TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk")  # names of the experts chosen for a token
NUM_SHARED_KEYS = ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert")
LATENT_KEYS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "head": "qk_nope_head_dim",
    "rope_head": "qk_rope_head_dim",
    "value_head": "v_head_dim",
}
MAX_PADDING_ROWS = 2  # embedding rows that some families put before the first position
PARAM_TOLERANCE = (
    0.1  # relative difference of parameter counts above which a model is no decoder of equal layers
)


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model; of a config also the number of parameters in matrices (0: unknown), and its
    attention.

    `max_positions` are learned positions (0: none); `num_windowed_layers` layers attend to
    `attention_window` tokens; `is_bidirectional`: tokens attend to later ones too.
    """

    shape: ModelShape
    num_matrix_params: int = 0
    max_positions: int = 0
    attention_window: int = 0
    num_windowed_layers: int = 0
    is_bidirectional: bool = False


def model_shape(model: str, sequence: int) -> ModelShape:
    """Returns the sizes of `model`; `sequence` 0: its own length."""
    return model_size(model, sequence).shape


def model_size(model: str, sequence: int) -> ModelSize:
    """Returns what is known of `model`, with samples of `sequence` tokens (0: its own length)."""
    if not is_shape_text(model):
        return config_size(ModelConfig(model), sequence)
    known = ModelSize(parse_shape(model))
    return replace(known, shape=replace(known.shape, sequence=sequence)) if sequence else known


def size_warnings(size: ModelSize) -> Iterator[str]:
    """Yields the differences between a model and the decoder of the cost model."""
    shape, matrices, full = (
        size.shape,
        size.num_matrix_params,
        "it is estimated as if each token saw all before it",
    )
    if size.num_windowed_layers and size.attention_window < shape.sequence:
        text = (
            f"{size.num_windowed_layers} of {shape.layers} layers attend to "
            f"{size.attention_window:,} tokens of samples of "
            f"{shape.sequence:,}"
        )
        yield f"{text}: {full}, so expect less than these seconds."
    if size.is_bidirectional:
        yield f"Attention goes both ways: {full}, so expect attention to take up to twice as long."
    if matrices and abs(shape.numel / matrices - 1) > PARAM_TOLERANCE:
        text = (
            f"The model has {matrices / 1e9:.3g} B weights, and a decoder of its sizes "
            f"{shape.numel / 1e9:.3g} B"
        )
        yield f"{text}: it is estimated as the latter, so expect seconds and bytes to be off by as much."


def is_shape_text(model: str) -> bool:
    """Returns whether `model` is sizes as text, not a file or a repository."""
    embeddings = model.replace(":", " ").replace("=", " ").replace(",", " ").lower().split()
    return "layers" in embeddings and len(embeddings) > 1 and not Path(model).exists()


def _num_learned_positions(module: Any, positions: object) -> int:
    """Returns the number of learned positions of a `module` of transformers; 0 for rotary
    or other positions.
    """
    embeddings = module.get_input_embeddings()
    if not isinstance(positions, int):
        return 0
    for each in module.modules():
        if (
            isinstance(each, nn.Embedding)
            and each is not embeddings
            and 0 <= each.num_embeddings - positions <= MAX_PADDING_ROWS
        ):
            before = (
                0 if each.padding_idx is None else each.padding_idx + 1
            )  # rows of the table that stand for no position
            return min(positions, each.num_embeddings - before)
    return 0


def config_size(model: ModelConfig, sequence: int) -> ModelSize:
    """Returns what is known of the model of a config, with samples of `sequence` tokens (0: its own length).

    Raises PlanError for a model that is missing, that is not searched, or whose sizes are not known.
    """
    source = model.source
    raise_diagnostics(_missing_source_diagnostics(source))
    config = read_source_config(model)
    if config is not None:
        raise_diagnostics(_unsearched(source, config))  # before the model is made, which takes seconds
    loaded = load_model(model, seed=0)
    module = loaded.deferred_init.instantiate()
    config = config_of(module)
    if config is None:
        text = f"{source} makes a model without a config: its sizes are not known"
        raise PlanError(text, fix=f"say them: {SHAPE_FORMAT}", location="MODEL")
    raise_diagnostics([*_unsearched(source, config), *_unsized(source, config, sequence)])
    config_values, sizes = config.to_dict(), _sizes(config)
    positions = _num_learned_positions(module, sizes["sequence"])
    if 0 < positions < sequence:
        text = f"{source} has {positions} learned positions, and --sequence {sequence} is given"
        fix = f"--sequence {positions} at most, or say more in the config: max_position_embeddings"
        raise PlanError(text, fix=fix, location="--sequence")
    if sequence:
        sizes["sequence"] = sequence
    plain = ModelShape(
        Path(source).stem,
        **sizes,
        **_optional_sizes(config_values),
        **_expert_sizes(config_values, module, sizes["layers"]),
        tied=bool(config_values.get("tie_word_embeddings")),
    )
    matrices = sum(
        prod(entry.shape) for entry in loaded.deferred_init.logical_params.values() if len(entry.shape) > 1
    )
    head = config_values.get("head_dim") if plain.heads > 0 and not plain.kv_rank else 0
    wide = [plain, replace(plain, head=head)] if isinstance(head, int) and head != plain.head_dim else [plain]
    both = [replace(each, gated=gated) for each in wide for gated in (False, True)]
    shape = min(both, key=lambda shape: abs(shape.numel - matrices))
    return ModelSize(
        shape, matrices, positions, *_windows(config_values, shape.layers), _both_ways(module, config_values)
    )


def _windows(config_values: Mapping[str, Any], layers: int) -> tuple[int, int]:
    window = config_values.get("sliding_window")
    if not isinstance(window, int) or window < 1 or config_values.get("use_sliding_window") is False:
        return 0, 0
    kinds = config_values.get("layer_types")
    return window, kinds.count("sliding_attention") if kinds else layers


def _both_ways(module: nn.Module, config_values: Mapping[str, Any]) -> bool:
    masked = "ForMaskedLM" in type(module).__name__ or bool(config_values.get("use_bidirectional_attention"))
    return masked or any(vars(each).get("is_causal") is False for each in module.modules())


def _unsearched(source: str, config: Any) -> Iterator[Diagnostic]:
    exists = "a plan that exists is counted from its own program"
    if config.is_encoder_decoder:
        yield Diagnostic(
            f"{source} is an encoder and a decoder, which are not searched yet",
            f"take a decoder; {exists}",
            "MODEL",
        )
    values = config.to_dict()
    experts = _experts(values)
    if experts > 1 and not (_first(values, EXPERT_KEYS) and _first(values, TOP_K_KEYS)):
        text = f"{source} has {experts} experts in a layer, of which its config does not say how many a "
        text += "token goes to, or only that of a part of the model: such models are not searched yet"
        fix = f"say the sizes in words, with experts and top_k: {SHAPE_FORMAT}; {exists}"
        yield Diagnostic(text, fix, "MODEL")


def _unsized(source: str, config: Any, sequence: int) -> Iterator[Diagnostic]:
    sizes = _sizes(config) | ({"sequence": sequence} if sequence else {})
    lacking = [theirs for ours, theirs in HF_CONFIG_KEYS.items() if not isinstance(sizes[ours], int)]
    text = config.get_text_config()
    if lacking and text is not config:
        parts = ", ".join(
            name for name, part in config.to_dict().items() if isinstance(part, dict) and "model_type" in part
        )
        problem = f"{source} is a model of several models ({parts}), which are not searched yet"
        inner = _sizes(text) | _optional_sizes(text.to_dict()) | ({"sequence": sequence} if sequence else {})
        config_values = " ".join(
            f"{name} {size}" for name, size in inner.items() if isinstance(size, int) and size
        )
        config_values += " tied" if text.to_dict().get("tie_word_embeddings") else ""
        yield Diagnostic(
            problem,
            f'search for the one that reads text alone, by its sizes: "{Path(source).stem}: {config_values}"',
            "MODEL",
        )
    elif lacking == [HF_CONFIG_KEYS["sequence"]]:
        problem = f"the config of {source} has no sequence length ({lacking[0]})"
        yield Diagnostic(problem, "say it: --sequence 2048", "--sequence")
    elif lacking:
        yield Diagnostic(
            f"the config of {source} does not say {', '.join(lacking)}",
            f"say the sizes in words: {SHAPE_FORMAT}",
            "MODEL",
        )


def _missing_source_diagnostics(source: str) -> Iterator[Diagnostic]:
    if not Path(source).exists() and ".py" not in source and not is_hub_id(source):
        text = f"there is no file or folder '{source}', and it gives no sizes"
        fix = (
            f"say sizes in words: {SHAPE_FORMAT}; or name a folder with config.json, a .json "
            f"file, file.py:factory"
        )
        yield Diagnostic(text, f"{fix}, or a hub id (ORG/NAME)", "MODEL")


def _sizes(config: Any) -> dict[str, Any]:
    config_values = config.to_dict()
    return {
        ours: config_values.get(config.attribute_map.get(theirs, theirs))
        for ours, theirs in HF_CONFIG_KEYS.items()
    }


def _optional_sizes(config_values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that need not be said; 0: the usual."""
    ffn = (
        config_values.get("intermediate_size")
        or config_values.get("n_inner")
        or config_values.get("ffn_dim")
        or 0
    )
    plain = {
        "kv_heads": config_values.get("num_key_value_heads") or 0,
        "ffn": ffn,
        "head": config_values.get("head_dim") or 0,
    }
    if not config_values.get("kv_lora_rank"):
        return plain
    return plain | {ours: config_values.get(theirs) or 0 for ours, theirs in LATENT_KEYS.items()}


def _expert_sizes(config_values: Mapping[str, Any], module: nn.Module, layers: int) -> dict[str, Any]:
    """The sizes of the experts; none for a model without, or with one."""
    experts = _first(config_values, EXPERT_KEYS)
    if experts < 2:
        return {}
    own = _first(config_values, ("moe_intermediate_size",))
    width = own or _first(config_values, ("intermediate_size",))
    shared = _first(config_values, ("shared_expert_intermediate_size", "shared_intermediate_size"))
    stacks = {
        name.rpartition(".")[0]
        for name, parameter in module.named_parameters()
        if parameter.dim() == 3 and len(parameter) == experts
    }
    return {
        "experts": experts,
        "top_k": _first(config_values, TOP_K_KEYS),
        "expert_ffn": width,
        "shared_ffn": shared or _first(config_values, NUM_SHARED_KEYS) * width,
        "dense_layers": layers - len(stacks) if stacks else 0,
    }


def _first(config_values: Mapping[str, Any], names: Sequence[str]) -> int:
    """The first whole number under one of `names`; 0: there is none."""
    return next((config_values[name] for name in names if isinstance(config_values.get(name), int)), 0)


def _experts(config_values: Mapping[str, Any]) -> int:
    own = [config_values[name] for name in EXPERT_KEYS if isinstance(config_values.get(name), int)]
    return max([0, *own, *(_experts(each) for each in config_values.values() if isinstance(each, dict))])
