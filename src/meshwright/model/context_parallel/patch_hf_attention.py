"""Patches transformers' attention functions and positional biases for a sequence shard.

A transformers model attends through a function that its config names; on a sequence shard this is
`sharded_attention`:

    heads       transformers repeats keys and values for all query heads if there is a mask, not for every
                batch; here they reach torch's attention unrepeated, so that ranks exchange no copies
    causality   comes from the module, not from the number of local queries

T5 and similar models add a bias to the scores, which the first block computes for its queries and keys:

    bias[h, i, j] = table[bucket(j - i), h]        local queries i, all keys j

These are 2 N - 1 numbers per head, computed once.

The user's configs stay unchanged: modules get copies.
"""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn

from meshwright.model.context_parallel.attention_call import combine_bias_and_mask
from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.hf.declared_tp_plan import is_transformers_model
from meshwright.plan.job.errors import PlanError


class UnsupportedAttention(PlanError):
    """Attention that torch's function does not compute, whatever the lengths of the sequences."""


ATTENTION_NAME = "meshwright"  # name of `sharded_attention` in the registries of transformers
SUPPORTED_ATTENTION = ("sdpa", "eager")  # both compute the same function
# code that compares the name itself takes another branch for another name
SDPA_IN_CODE = re.compile(r"""["']sdpa["']""")
BIAS_FLAG = "has_relative_attention_bias"  # whether a module computes the bias or makes zeros
# arguments of other attention functions of transformers -> the model without it
UNSUPPORTED_ARGUMENTS = {
    "softcap": " (a model with attn_logit_softcapping = None in its config takes none)",
    "s_aux": "",
    "cache": "",
}

# (number of queries, number of keys) -> shards; None: all tokens are local
GetShards = Callable[[int, int], tuple[TokenShard, TokenShard] | None]
BiasCallback = Callable[[torch.Tensor], object]  # receives a bias [.., local queries, all keys]
SuspendModes = Callable[[], AbstractContextManager[object]]  # context around computing the bias


@dataclass(frozen=True)
class PatchedAttention:
    """The patched modules, with the attributes they had before."""

    saved_attributes: tuple[tuple[nn.Module, Mapping[str, Any]], ...]

    def restore(self) -> None:
        """Restores the attributes of all modules."""
        for module, values in self.saved_attributes:
            module.__dict__.pop("compute_bias", None)
            module.__dict__.update(values)


def patch_attention(
    module: nn.Module,
    get_shards: GetShards,
    suspend_modes: SuspendModes = nullcontext,
    on_bias: BiasCallback = id,
) -> PatchedAttention:
    """Makes the transformers modules in `module` attend by `sharded_attention`, with biases for the local
    tokens.
    """
    patched = _patched_configs(module)
    before = list[tuple[nn.Module, Mapping[str, Any]]]()
    for each in module.modules():
        submodule, attributes = cast(Any, each), vars(each)
        saved = {"config": attributes["config"]} if id(attributes.get("config")) in patched else {}
        saved |= {
            name: attributes[name]
            for name in ("compute_bias", BIAS_FLAG)
            if name in attributes and _has_relative_bias(submodule)
        }
        if saved or _has_relative_bias(submodule):
            before.append((submodule, saved))
        if "config" in saved:
            submodule.config = patched[id(saved["config"])]
        if _has_relative_bias(submodule):
            submodule.compute_bias = partial(
                _sharded_bias, submodule, submodule.compute_bias, (get_shards, suspend_modes, on_bias)
            )
            submodule.has_relative_attention_bias = (
                submodule.has_relative_attention_bias or _is_cross_attention(submodule)
            )
    return PatchedAttention(tuple(before))


def attends_by_name(model: Any) -> bool:
    """Returns whether attention of the transformers model `model` is, or can become, `sharded_attention`."""
    config = model.config.get_text_config(decoder=True)
    return config._attn_implementation == ATTENTION_NAME or id(config) in _patched_configs(model)


def sharded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Returns attention with the interface of transformers, for [samples, heads, tokens, head dim]; keys may
    have fewer heads.

    Returns [samples, tokens, heads, head dim] and None. Raises UnsupportedAttention for arguments that
    torch's function does not support.
    """
    for name, setting in UNSUPPORTED_ARGUMENTS.items():
        if more.get(name) is not None:
            text = f"attention takes '{name}', which F.scaled_dot_product_attention does not support{setting}"
            raise UnsupportedAttention(
                text, fix="set mesh.cp = 1: no strategy shards the sequences of this model", location="model"
            )
    causal = (_is_causal(module) if is_causal is None else is_causal) and attention_mask is None
    mask = attention_mask
    if position_bias is not None and not _is_cross_attention(module):
        if causal and not _has_relative_bias(module):
            text = "attention is causal by a flag, and adds a bias computed for its queries and keys"
            raise PlanError(text, fix="give it a causal mask; or set mesh.cp = 1", location="model")
        # a bias of `_sharded_bias` already contains the causal mask
        mask, causal = (
            combine_bias_and_mask(position_bias, attention_mask),
            False,
        )
    grouped = query.shape[1] != key.shape[1]
    compute_bias = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=grouped,
    )
    return compute_bias.transpose(1, 2).contiguous(), None


def _is_causal(module: nn.Module) -> bool:
    """Whether the module is causal; like transformers, a module that does not say so counts as causal."""
    try:
        return bool(module.is_causal)
    except AttributeError:
        return True


def _has_relative_bias(module: nn.Module) -> bool:
    has_attributes = {BIAS_FLAG, "is_decoder", "is_causal", "n_heads"} <= vars(module).keys()
    return (
        has_attributes and type(module).__module__.startswith("transformers.") and _takes_offset(type(module))
    )


@cache
def _takes_offset(device_type: type[Any]) -> bool:
    """Whether modules of this type compute their bias for queries that start at any position."""
    compute_bias = inspect.getattr_static(device_type, "compute_bias", None)
    return compute_bias is not None and list(inspect.signature(compute_bias).parameters)[1:] == [
        *("query_length", "key_length", "device", "past_seen_tokens")
    ]


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a T5 module attends to an encoder: its bias is zero."""
    return _has_relative_bias(module) and bool(module.is_decoder) and not module.is_causal


def _sharded_bias(
    module: Any,
    compute_full_bias: Callable[..., torch.Tensor],
    hooks: tuple[GetShards, SuspendModes, BiasCallback],
    query_length: int,
    key_length: int,
    **more: Any,
) -> torch.Tensor:
    """Returns the bias [1, heads, local queries, all keys]; that of a causal module masks later keys."""
    get_shards, suspend_modes, on_bias = hooks
    shards = get_shards(query_length, key_length)
    if shards is None and not _is_cross_attention(module):
        return compute_full_bias(query_length, key_length, **more)
    length = key_length if shards is None else shards[1].length
    if shards is None or _is_cross_attention(module):
        bias = _zero_scalar(module).expand(1, module.n_heads, query_length, length)
        on_bias(bias)
        return bias
    query_shard = shards[0]
    with suspend_modes():
        biases_by_offset = compute_full_bias(
            1, 2 * length - 1, device=more.get("device"), past_seen_tokens=length - 1
        )[0, :, 0]
        offset = torch.arange(length, device=biases_by_offset.device) - query_shard.positions(
            biases_by_offset.device
        ).unsqueeze(-1)
        bucket_index = offset + (length - 1)
        bias = biases_by_offset.index_select(1, bucket_index.flatten()).view(
            1, biases_by_offset.shape[0], *bucket_index.shape
        )
        if module.is_causal:
            bias = torch.where(offset <= 0, bias, torch.finfo(bias.dtype).min)
    on_bias(bias)
    return bias


def _zero_scalar(module: nn.Module) -> torch.Tensor:
    weight = next(module.parameters())
    device_type = weight.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    return torch.zeros((), dtype=dtype, device=weight.device)


def _patched_configs(module: nn.Module) -> dict[int, Any]:
    """Returns copies of the configs that modules hold, naming `sharded_attention`, by id of the original.

    Configs inside a config are copied too. A config stays unchanged if a model that holds it compares the
    name itself.
    """
    holders: dict[int, list[type[Any]]] = {}
    configs: dict[int, Any] = {}
    for submodule in module.modules():
        config = vars(submodule).get("config")
        if config is not None and type(config).__module__.startswith("transformers."):
            configs[id(config)] = config
            if is_transformers_model(submodule):
                holders.setdefault(id(config), []).append(type(submodule))
    named = [
        each
        for each in configs
        if configs[each]._attn_implementation in SUPPORTED_ATTENTION
        and all(map(_pluggable, holders.get(each, [])))
    ]
    named = [each for each in named if each in holders and not configs[each].output_attentions]
    if not named:
        return {}
    _register_attention()
    memo: dict[int, Any] = {}
    patched = {each: copy.deepcopy(config, memo) for each, config in configs.items()}
    for each in named:
        patched[each]._attn_implementation_internal = ATTENTION_NAME
    return patched


@cache
def _pluggable(device_type: type[Any]) -> bool:
    has_attributes: Any = next(
        each for each in device_type.__mro__ if each.__module__.startswith("transformers.")
    )
    source = inspect.getsource(sys.modules[has_attributes.__module__])
    # a model without sdpa attends by the registered function too, if it takes flex attention
    takes_it = device_type._supports_sdpa or device_type._supports_attention_backend
    can_set = takes_it and has_attributes._can_set_attn_implementation()
    return can_set and not SDPA_IN_CODE.search(source)


def _register_attention() -> None:
    masks = transformers.masking_utils
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sharded_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, masks.sdpa_mask)
