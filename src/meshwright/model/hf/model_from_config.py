"""Builds a transformers model from its config: architecture and sizes, without weights.

The config is read as JSON, because two of its fields must not take effect: the dtype (parameters are
float32 whatever the published weights were) and `auto_map` (code from a repository). Overrides replace
fields before the config is made, so that what transformers derives from a field follows it.

`repository_factory` is the one place where code from a hub repository is imported. It is reached only with
`model.trust_remote_code` and a commit, so that the code that runs is the code that was reviewed. transformers
imports the files that `auto_map` names from the snapshot of that commit.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn

from meshwright.model.hf.declared_tp_plan import config_of
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics, suggest_name

# of configs of transformers: the experts of a layer, and those that a token chooses
EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk")


def repository_factory(
    folder: Path, raw: Mapping[str, Any], auto_map: Mapping[str, Any], overrides: Mapping[str, Any]
) -> Callable[[], nn.Module]:
    """Returns the function that constructs the model of `raw`, from classes in `folder` that `auto_map`
    names.

    Raises PlanError if the code cannot be imported, lacks the architecture, or refuses the config.
    """
    references = {
        str(reference).rpartition(".")[2]: str(reference)
        for reference in auto_map.values()
        if isinstance(reference, str)
    }
    architecture = next(iter(raw.get("architectures") or ()), "")
    if architecture not in references:
        text = (
            f"auto_map names {', '.join(references) or 'no class'}, and the architecture is '{architecture}'"
        )
        raise PlanError(text, fix="name in architectures a class that auto_map has", location=CONFIG_KEY)
    get_class = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
    try:
        if "AutoConfig" in auto_map:
            config_class: Any = get_class(auto_map["AutoConfig"], str(folder))
        else:
            config_class = transformers.CONFIG_MAPPING[raw["model_type"]]
        model_class: Any = get_class(references[architecture], str(folder))
        config = config_class.from_dict({**raw, **overrides, "auto_map": dict(auto_map)})
    except Exception as error:  # third-party code may raise anything
        text = f"the code of the repository in {folder} fails: {type(error).__name__}: {error}"
        raise PlanError(
            text, fix="install what it needs, or choose another commit: model.revision", location=CONFIG_KEY
        ) from error
    return lambda: model_class(copy.deepcopy(config))


CONFIG_KEY = "model.source"
BATCHED_EXPERTS, GROUPED_EXPERTS = "batched_mm", "grouped_mm"
FIXED_FIELDS = ("model_type", "architectures", "transformers_version", "dtype", "use_cache")
PER_LAYER_FIELDS = ("layer_types", "mlp_layer_types")


@dataclass(frozen=True)
class TextLimits:
    """The vocabulary size and the longest sequence of a model; None if the model does not declare it."""

    vocab_size: int | None = None
    max_positions: int | None = None


def config_factory(
    source: str, overrides: Mapping[str, Any], *, trust_remote_code: bool = False
) -> Callable[[], nn.Module]:
    """Returns the function that constructs the model of the config at `source`, a .json file or its folder.

    The class is the first of `architectures`; without that field, the causal language model of the model
    type. Classes from the folder itself (`auto_map`) are used only with `trust_remote_code`.

    Raises PlanError for a file that is missing, unreadable or of no known model type, for an unknown
    architecture, and for overrides that the config does not have or refuses.
    """
    raw = _read_json(Path(source))
    auto_map = raw.pop("auto_map", None)
    if trust_remote_code and isinstance(auto_map, dict):
        return repository_factory(Path(source), raw, auto_map, overrides)
    config = _build_config(source, raw, auto_map, overrides)
    names = raw.get("architectures") or []
    if not names:
        return lambda: transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
        )
    architecture = _find_architecture(names[0], raw["model_type"])
    return lambda: architecture(copy.deepcopy(config))


def read_config(source: str) -> Any:
    """Returns the config at `source`; makes no model and runs no code. Raises PlanError as `config_factory`
    does.
    """
    raw = _read_json(Path(source))
    return _build_config(source, raw, raw.pop("auto_map", None), {})


def text_limits(module: nn.Module) -> TextLimits:
    """Returns the text limits in the config of a transformers model; empty for other modules."""
    config = config_of(module)
    if config is None:
        return TextLimits()
    config = config.get_text_config()
    fields = config.to_dict()
    sizes = [
        fields.get(config.attribute_map.get(name, name)) for name in ("vocab_size", "max_position_embeddings")
    ]
    return TextLimits(*(size if isinstance(size, int) and size > 0 else None for size in sizes))


def _read_json(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        fix = "give a folder that holds config.json, a .json file, or file.py:factory"
        raise PlanError(f"there is no file {path}", fix=fix, location=CONFIG_KEY)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(
            f"{path} cannot be read as JSON: {error}",
            fix="correct the file, or download it again",
            location=CONFIG_KEY,
        ) from error
    if not isinstance(raw, dict):
        raise PlanError(
            f"{path} holds a {type(raw).__name__}; a config is an object",
            fix="give a transformers config.json",
            location=CONFIG_KEY,
        )
    return {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}


def _build_config(source: str, raw: dict[str, Any], auto_map: object, overrides: Mapping[str, Any]) -> Any:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise PlanError(
            f"{source} has no model_type",
            fix='add the field model_type, for example "llama"',
            location=CONFIG_KEY,
        )
    if model_type not in transformers.CONFIG_MAPPING and auto_map:
        text = (
            f"the model type '{model_type}' is not known to transformers; its repository brings code for it, "
            "which is not run"
        )
        fix = (
            "look at it, then set model.trust_remote_code = true and model.revision to its commit, or use "
            "file.py:factory"
        )
        raise PlanError(text, fix=fix, location=CONFIG_KEY)
    if model_type not in transformers.CONFIG_MAPPING:
        fix = suggest_name(model_type, transformers.CONFIG_MAPPING)
        raise PlanError(
            f"the model type '{model_type}' is not known to transformers", fix=fix, location=CONFIG_KEY
        )
    config_class = transformers.CONFIG_MAPPING[model_type]
    config = _make_config(config_class, raw, {})
    if overrides:
        config = _make_config(config_class, raw, _check_overrides(overrides, config))
    _check_choices(config)
    return config


def _check_choices(config: Any) -> None:
    """Raises PlanError if a token chooses more experts than there are, or none of them."""
    whole = config.to_dict()
    for fields in (whole, *(part for part in whole.values() if isinstance(part, dict))):
        for name, field in product(CHOSEN_FIELDS, EXPERTS_FIELDS):
            k, number = fields.get(name), fields.get(field)
            if isinstance(k, int) and isinstance(number, int) and number > 0 and not 0 < k <= number:
                text = f"each token chooses {name} = {k} of {field} = {number} experts"
                fix = f"set {name} from 1 to {number}, in the config or in model.overrides; or more experts"
                raise PlanError(text, fix=fix, location=CONFIG_KEY)


def _check_overrides(overrides: Mapping[str, Any], config: Any) -> dict[str, Any]:
    fields = (set(config.to_dict()) | set(config.attribute_map)).difference(FIXED_FIELDS)
    raise_diagnostics(
        Diagnostic(
            f"a {config.model_type} config has no field '{name}' to override",
            suggest_name(name, fields),
            f"model.overrides.{name}",
        )
        for name in overrides
        if name not in fields
    )
    return {config.attribute_map.get(name, name): value for name, value in overrides.items()}


def is_quantized(module: nn.Module) -> bool:
    """Returns whether the config of a transformers model says that its published weights are quantized."""
    config = config_of(module)
    return config is not None and config.to_dict().get("quantization_config") is not None


def use_eager_experts(module: nn.Module) -> None:
    """Makes a transformers MoE model loop over experts: the grouped product has no float64 kernel."""
    if config_of(module) is not None:
        cast(Any, module).set_experts_implementation("eager")


def use_batched_experts(module: nn.Module) -> None:
    """Makes a transformers mixture of experts gather weights by token, which works on fake tensors."""
    if config_of(module) is not None:
        cast(Any, module).set_experts_implementation(BATCHED_EXPERTS)


def gathers_expert_weights(module: nn.Module) -> bool:
    """Returns whether a transformers mixture of experts gathers weights by token, by its own setting."""
    return any(config._experts_implementation == BATCHED_EXPERTS for config in _configs(module))


def use_grouped_experts(module: nn.Module) -> None:
    """Makes transformers experts that gather weights by token compute one grouped product: a token then costs
    its own activations, and no copy of an expert.
    """
    for config in _configs(module):
        if config._experts_implementation == BATCHED_EXPERTS:
            config._experts_implementation_internal = GROUPED_EXPERTS


@contextmanager
def batched_experts(block: nn.Module) -> Iterator[None]:
    """Makes the transformers experts in `block` gather weights by token meanwhile, which works on fake
    tensors.
    """
    before = [(config, config._experts_implementation) for config in _configs(block)]
    for config, _ in before:
        config._experts_implementation_internal = BATCHED_EXPERTS
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation_internal = implementation


def _configs(module: nn.Module) -> list[Any]:
    """Returns the transformers configs of the modules in `module`, each once."""
    found = (config_of(part) for part in module.modules())
    return list({id(config): config for config in found if config is not None}.values())


def _make_config(config_class: Any, raw: dict[str, Any], overrides: dict[str, Any]) -> Any:
    aliases = [alias for alias, field in config_class.attribute_map.items() if field in overrides]
    fields = {name: value for name, value in raw.items() if name not in aliases} | overrides
    depth = overrides.get(config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    for name in PER_LAYER_FIELDS:  # a list with one item per layer must follow the number of layers
        if isinstance(depth, int) and name not in overrides and isinstance(fields.get(name), list):
            items = fields.pop(name)
            fields |= {name: items[:depth]} if depth <= len(items) else {}
    try:
        with _silence_special_tokens():
            return config_class.from_dict(fields)
    except Exception as error:  # transformers raises a dozen kinds for values it refuses
        with_overrides = f" with {overrides}" if overrides else ""
        fix = (
            "change the field that the message names; overrides must fit each other (heads divide the "
            "width...)"
        )
        raise PlanError(
            f"transformers refuses the config{with_overrides}: {error}",
            fix=fix,
            location="model.overrides" if overrides else CONFIG_KEY,
        ) from error


@contextmanager
def _silence_special_tokens() -> Iterator[None]:
    # transformers warns that bos or eos lie outside the vocabulary; they matter in generation only
    logger = logging.getLogger(transformers.configuration_utils.__name__)

    def is_other_message(record: logging.LogRecord) -> bool:
        return "_token_id" not in record.getMessage()

    logger.addFilter(is_other_message)
    try:
        yield
    finally:
        logger.removeFilter(is_other_message)


def _find_architecture(name: str, model_type: str) -> type[nn.Module]:
    stem = model_type.replace("_", "").replace("-", "")
    candidates = {
        candidate
        for candidate in dir(transformers)
        if candidate.lower().startswith(stem) and ("For" in candidate or candidate.endswith("Model"))
    }
    if name not in dir(transformers):
        fix = (
            suggest_name(name, candidates)
            + " (only classes of transformers itself are built; code from a repository is not run)"
        )
        raise PlanError(
            f"the architecture '{name}' is not known to transformers", fix=fix, location=CONFIG_KEY
        )
    return getattr(transformers, name)
