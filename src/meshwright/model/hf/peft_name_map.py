"""Models of `peft`: maps between an adapted model and its base, which stays as published.

    in the adapted model                                                 in its base
    base_model.model.layers.0.q_proj.base_layer.weight         frozen    layers.0.q_proj.weight
    base_model.model.layers.0.q_proj.lora_A.default.weight     trained   --
    base_model.model.layers.0.q_proj.lora_B.default.weight     trained   --
    base_model.model.lm_head.original_module.weight            frozen    lm_head.weight
    base_model.model.lm_head.modules_to_save.default.weight    trained   lm_head.weight, its initial value

Names are not parsed: peft itself removes the adapters from a copy without values, and a tensor that is in
both has two names. Classes are recognized by their names, because `peft` is optional: it is installed if
somebody made such a model.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from torch import nn

from meshwright.plan.job.errors import PlanError

PACKAGE = "peft"
INSTALL_PEFT = "pip install 'meshwright[adapters]'"
WRAPPER_CLASSES = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}


def is_adapted(module: nn.Module) -> bool:
    """Returns whether `module` is a model of peft."""
    return "PeftModel" in {kind.__name__ for kind in type(module).__mro__}


def is_adapter_layer(module: nn.Module) -> bool:
    """Returns whether `module` is a layer with its adapter, or with a trained copy of it."""
    return not WRAPPER_CLASSES.isdisjoint(kind.__name__ for kind in type(module).__mro__)


def unload_adapters(module: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Returns the base of an adapted `module` (which is consumed), and the base name of every parameter and
    buffer.

    Keys are all tied names in the adapted model; the name in the base is the first one there. A trained copy
    of a module has the name of that module. `module` needs no values.
    """
    adapted: Any = module
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(module):
        names.setdefault(id(tensor), []).append(name)
    copies = list(_copies(module))
    base = adapted.get_base_model() if adapted.active_peft_config.is_prompt_learning else adapted.unload()
    found: dict[str, str] = {}
    for base_name, tensor in _tensors(base):
        for name in names.get(id(tensor), ()):
            found.setdefault(name, base_name)
    for name, original in copies:  # peft leaves one of the two in the base
        if name in found or original in found:
            base_name = found.get(name, found.get(original, ""))
            found |= {name: base_name, original: base_name}
    return base, found


def import_peft() -> Any:
    """Returns the package peft. Raises PlanError, which names the extra to install, if it is missing."""
    try:
        return import_module(PACKAGE)
    except ImportError as error:
        raise PlanError(
            f"the package {PACKAGE} cannot be imported ({error})", fix=INSTALL_PEFT, location="model"
        ) from error


def suggest_fix(error: BaseException, default: str) -> str:
    """Returns the fix for an error in a user's code: installing peft if that is missing, else `default`."""
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == PACKAGE
    return INSTALL_PEFT if is_missing else default


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _copies(module: nn.Module) -> Iterator[tuple[str, str]]:
    for path, part in module.named_modules():
        copies = part._modules.get("modules_to_save") if is_adapter_layer(part) else None
        if copies is not None:
            for adapter, copy in copies.named_children():
                for leaf, _ in _tensors(copy):
                    yield f"{path}.modules_to_save.{adapter}.{leaf}", f"{path}.original_module.{leaf}"
