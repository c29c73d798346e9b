"""Writes an adapter like peft, or merges it into its base.

    adapter_config.json            written by peft, with the name of the base model
    adapter_model.safetensors      the trained parts under peft's names: ...q_proj.lora_A.weight,
                                   ...lm_head.weight

peft says which tensors belong to an adapter and what they are called, on a model without values. The values
are those of the full logical parameters, so nothing depends on how they were sharded. Before the folder gets
its name, peft loads it onto the base, and the logits are compared (`roundtrip_check`). Merged, W + (alpha /
r) B A replaces W, in a model that needs no peft; for that the whole model is in memory once, in float32.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.model.hf.hub import is_hub_id
from meshwright.model.hf.peft_name_map import import_peft, is_adapted, unload_adapters
from meshwright.model.loading.deferred_init import DeferredInit, LogicalParam, logical_names
from meshwright.model.loading.init_tape import InitTape
from meshwright.plan.job.errors import PlanError
from meshwright.run.checkpoint.shard_io import write_shard
from meshwright.run.export.roundtrip_check import RoundTripResult, compare_adapter, load_values

WHERE = "export"
ADAPTER_FILE = "adapter_model.safetensors"
MERGE_FIX = "write the merged model: --merge, trainer.export(folder, merge=True)"

ReadValue = Callable[[str], torch.Tensor]


def write_adapter(
    deferred_init: DeferredInit, read_value: ReadValue, folder: Path, dtype: torch.dtype | None, base: str
) -> tuple[int, RoundTripResult]:
    """Writes the adapter of the model, its floating-point tensors in `dtype`, into `folder`; returns its
    bytes and the comparison.

    `read_value(name)` returns a logical parameter; `base` locates the base model, "" as the adapter's config
    names it.
    """
    model: Any = _require_weight_adapter(deferred_init.instantiate())
    adapter = only_adapter(model)
    config = copy.deepcopy(model.peft_config[adapter])
    config.base_model_name_or_path = _stored_base(base or config.base_model_name_or_path or "")
    names = adapter_tensor_names(model, adapter)
    tensors = {stored: _cast(read_value(name), dtype) for stored, name in names.items()}
    _check(model, names, tensors)
    shard = write_shard(folder / ADAPTER_FILE, tensors)
    _write_config(model, config, folder)
    return shard.nbytes, compare_adapter(deferred_init, read_value, folder, dtype, names)


def only_adapter(model: Any) -> str:
    """Returns the name of the adapter of `model`. Raises PlanError if it has several."""
    adapters = list(model.peft_config)
    if len(adapters) != 1:
        text = f"the model holds {len(adapters)} adapters ({', '.join(adapters)}), and a folder is one"
        raise PlanError(text, fix=f"leave one of them in the factory, or {MERGE_FIX}", location=WHERE)
    return adapters[0]


def adapter_tensor_names(model: nn.Module, adapter: str) -> dict[str, str]:
    """Returns {name in the file: name in `model`} of every tensor of `adapter`; the model needs no values."""
    state = model.state_dict()
    known = {id(tensor): name for name, tensor in state.items()}
    found = import_peft().get_peft_model_state_dict(model, state, adapter, save_embedding_layers=False)
    made = [stored for stored, tensor in found.items() if id(tensor) not in known]
    if made or not found:
        what = f"computes {made[0]} anew" if made else "finds no tensor of it"
        raise PlanError(f"peft {what} when it saves the adapter '{adapter}'", fix=MERGE_FIX, location=WHERE)
    return {stored: known[id(tensor)] for stored, tensor in found.items()}


def merge_adapter(deferred_init: DeferredInit, read_value: ReadValue) -> tuple[DeferredInit, ReadValue]:
    """Returns the base model with the adapter merged into it: a deferred init without recipes, and its
    values.

    Raises PlanError for a model without an adapter, or with one that peft cannot merge.
    """
    if not is_adapted(deferred_init.instantiate()):
        text = f"a {type(deferred_init.instantiate()).__name__} has no adapter that could be merged"
        raise PlanError(text, fix="leave --merge out (merge=True)", location=WHERE)
    whole: Any = _require_weight_adapter(deferred_init.instantiate())
    load_values(whole, deferred_init, lambda name: read_value(name).clone())  # peft adds to them in place
    base = whole.merge_and_unload()
    bare, _ = unload_adapters(deferred_init.instantiate())
    kept = {**dict(base.named_parameters()), **dict(base.named_buffers())}
    entries = {name: base.get_parameter(name) for name in logical_names(bare)}
    logical = {
        name: LogicalParam(
            tuple(entries[name].shape), entries[name].dtype, entries[name].requires_grad, aliases
        )
        for name, aliases in logical_names(bare).items()
    }
    return DeferredInit(bare, logical, {}, InitTape(), 0), lambda name: kept[name].detach()


def _require_weight_adapter(model: Any) -> Any:
    if model.active_peft_config.is_prompt_learning:
        text = f"the adapter ({model.active_peft_config.peft_type}) consists of prompt tokens, not of weights"
        raise PlanError(text, fix="adapt weights instead: peft.LoraConfig, peft.IA3Config", location=WHERE)
    return model


def _stored_base(base: str) -> str:
    if base and (is_hub_id(base) or Path(base).exists()):
        return base
    text = (
        f"its base is not there any more: {base}"
        if base
        else "its base has values from the seed, which are stored nowhere"
    )
    fix = f"start from a base that is stored (model.weights, analyze(..., weights=...)), or {MERGE_FIX}"
    raise PlanError(f"an adapter is of use only with its base, and {text}", fix=fix, location=WHERE)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _check(model: nn.Module, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for stored, name in names.items():
        if tuple(tensors[stored].shape) != shapes[name]:
            text = f"{name} is {list(tensors[stored].shape)} here and {list(shapes[name])} in the model"
            raise PlanError(text, fix="export with trainer.export, which gathers the shards", location=WHERE)


def _write_config(model: Any, config: Any, folder: Path) -> None:
    """adapter_config.json; without a task, peft finds the class of the base in it."""
    config.inference_mode = True
    for key, config_values in vars(config).items():
        if isinstance(config_values, set):
            setattr(config, key, sorted(config_values))  # the same file every time
    kind = type(model.get_base_model())
    named = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=None if config.task_type else named)
