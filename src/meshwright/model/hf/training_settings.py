"""Changes the settings of a built transformers model that stand in the way of training under a plan.

    use_cache                  off: training needs no key-value cache
    activation checkpointing   off: the strategy of that name does it, and the plan counts it
    attention                  flash attention, flex attention and kernels of the hub -> torch's attention

Each computes the same function. Fake tensors have no kernels of flash or flex attention, and a sequence shard
attends by torch's own function.
"""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from meshwright.model.hf.declared_tp_plan import config_of, is_transformers_model

TORCH_ATTENTION, EAGER_ATTENTION = "sdpa", "eager"
FLEX_ATTENTION, FLASH_ATTENTION, HUB_KERNEL = "flex_attention", "flash_attention", "/"


def disable_key_value_cache(module: nn.Module) -> None:
    """Sets `use_cache` to False in the configs of the models inside `module`."""
    for config in {id(config): config for model in _models(module) for config in _configs(model)}.values():
        if "use_cache" in config.to_dict():
            config.use_cache = False


def disable_activation_checkpointing(module: nn.Module) -> bool:
    """Turns off the checkpointing of the models inside `module`; returns whether it was on."""
    enabled = [
        inner
        for model in _models(module)
        for inner in model.modules()
        if vars(inner).get("gradient_checkpointing")
    ]
    for inner in enabled:
        cast(Any, inner).gradient_checkpointing = False
    return bool(enabled)


def use_torch_attention(module: nn.Module) -> tuple[str, str] | None:
    """Makes the models inside `module` attend by torch instead of a kernel; returns the names of the two
    implementations, None if nothing changed.
    """
    found = None
    for model in _models(module):
        given = str(config_of(model)._attn_implementation)
        if given == FLEX_ATTENTION or given.startswith(FLASH_ATTENTION) or HUB_KERNEL in given:
            chosen = TORCH_ATTENTION if cast(Any, model)._supports_sdpa else EAGER_ATTENTION
            cast(Any, model).set_attn_implementation(chosen)
            found = found or (given, chosen)
    return found


def _models(module: nn.Module) -> Iterator[nn.Module]:
    return (inner for inner in module.modules() if is_transformers_model(inner))


def _configs(model: nn.Module) -> Iterator[Any]:
    yield config_of(model)
    yield config_of(model).get_text_config()
