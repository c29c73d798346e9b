"""Adapters: a model of `peft` as what it is, a base model that stays as it was published and small trained parts inside it.

    in the adapted model                                                 in its base
    base_model.model.layers.0.q_proj.base_layer.weight         frozen    layers.0.q_proj.weight
    base_model.model.layers.0.q_proj.lora_A.default.weight     trained   --
    base_model.model.layers.0.q_proj.lora_B.default.weight     trained   --
    base_model.model.lm_head.original_module.weight            frozen    lm_head.weight
    base_model.model.lm_head.modules_to_save.default.weight    trained   lm_head.weight, which it starts from

The names are not taken apart: peft itself takes the adapters off a copy without values, and what is then the same tensor has
two names. Classes are known by their names, because `peft` is optional: it is here when somebody has made such a model.
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
    """Whether `module` is a model of peft."""
    return "PeftModel" in {kind.__name__ for kind in type(module).__mro__}


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether `module` is a layer with its adapter, or with a trained copy of it: a whole, though it holds dicts of modules."""
    return not WRAPPER_CLASSES.isdisjoint(kind.__name__ for kind in type(module).__mro__)


def unload_adapters(module: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """The base of an adapted `module`, which is used up, and the name in it of every parameter and buffer that it has.

    Names are those of the adapted model, all of a tie; the name in the base is the first one there. A trained copy of a part
    has the name of that part. `module` needs no values.
    """
    adapted: Any = module
    names: dict[int, list[str]] = {}
    for name, tensor in _tensors(module):
        names.setdefault(id(tensor), []).append(name)
    copies = list(_copies(module))
    base = adapted.get_base_model() if adapted.active_peft_config.is_prompt_learning else adapted.unload()
    found: dict[str, str] = {}
    for own, tensor in _tensors(base):
        for name in names.get(id(tensor), ()):
            found.setdefault(name, own)
    for name, other in copies:  # peft leaves one of the two in the base
        if name in found or other in found:
            own = found.get(name, found.get(other, ""))
            found |= {name: own, other: own}
    return base, found


def import_peft() -> Any:
    """The package peft. Raises PlanError, which names the extra, where it is not installed."""
    try:
        return import_module(PACKAGE)
    except ImportError as error:
        raise PlanError(
            f"the package {PACKAGE} cannot be imported ({error})", fix=INSTALL_PEFT, location="model"
        ) from error


def suggest_fix(error: BaseException, default: str) -> str:
    """How to repair what a user's own code raised: by installing peft, if that is what it lacks, else `otherwise`."""
    lacks = isinstance(error, ModuleNotFoundError) and error.name == PACKAGE
    return INSTALL_PEFT if lacks else default


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _copies(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The name of each tensor of a part that is kept aside, with that of its trained copy."""
    for path, part in module.named_modules():
        copies = part._modules.get("modules_to_save") if is_adapter_layer(part) else None
        if copies is not None:
            for adapter, copy in copies.named_children():
                for leaf, _ in _tensors(copy):
                    yield f"{path}.modules_to_save.{adapter}.{leaf}", f"{path}.original_module.{leaf}"
