"""transformers' plug points where each rank has some of the tokens: attention, and biases by position.

A model of transformers attends through a function that its config names. Where tokens are dealt it is `attended`:

    heads       transformers repeats keys and values for all heads of queries when there is a mask, and so not for every batch;
                here they go to torch's attention as they are, and what travels between ranks is theirs alone
    causality   it is told by the module, and not by how many queries are here

T5 and its like add a bias to scores, which the first block makes for as many queries and keys as it is given:

    bias[h, i, j] = table[bucket(j - i), h]        own queries i, all keys j: of 2 N - 1 numbers per head, computed once

The user's configs stay as they are: modules get copies.
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

from meshwright.model.hf.metadata import is_transformers_model
from meshwright.model.sequence_parallel.attention_call import combine_bias_and_mask
from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.plan.job.errors import PlanError

ATTENTION_NAME = "meshwright"  # of `attended`, in transformers' tables
SUPPORTED_ATTENTION = ("sdpa", "eager")  # both compute the same
SDPA_IN_CODE = re.compile(
    r"""["']sdpa["']"""
)  # code that asks for the name of the function itself takes another way for another name
BIAS_FLAG = "has_relative_attention_bias"  # whether a module asks for a bias, or makes zeros itself
UNSUPPORTED_ARGUMENTS = ("softcap", "s_aux", "cache")  # what other functions of transformers know besides

GetShards = Callable[
    [int, int], tuple[TokenShard, TokenShard] | None
]  # of so many queries and keys, which are here; None: all
BiasCallback = Callable[[torch.Tensor], object]  # hears of a bias: own queries, all keys
SuspendModes = Callable[[], AbstractContextManager[object]]  # round the making of it


@dataclass(frozen=True)
class PatchedAttention:
    """What was plugged in: the modules, and what stood there."""

    saved_attributes: tuple[tuple[nn.Module, Mapping[str, Any]], ...]

    def restore(self) -> None:
        """Leave the modules as they were."""
        for module, values in self.saved_attributes:
            module.__dict__.pop("compute_bias", None)
            module.__dict__.update(values)


def patch_attention(
    module: nn.Module,
    get_shards: GetShards,
    suspend_modes: SuspendModes = nullcontext,
    on_bias: BiasCallback = id,
) -> PatchedAttention:
    """Have the parts of `module` that are transformers' attend by `attended`, with biases for the tokens that are here."""
    copies = _patched_configs(module)
    before = list[tuple[nn.Module, Mapping[str, Any]]]()
    for each in module.modules():
        part, said = cast(Any, each), vars(each)
        old = {"config": said["config"]} if id(said.get("config")) in copies else {}
        old |= {
            name: said[name]
            for name in ("compute_bias", BIAS_FLAG)
            if name in said and _has_relative_bias(part)
        }
        if old or _has_relative_bias(part):
            before.append((part, old))
        if "config" in old:
            part.config = copies[id(old["config"])]
        if _has_relative_bias(part):
            part.compute_bias = partial(
                _sharded_bias, part, part.compute_bias, (get_shards, suspend_modes, on_bias)
            )
            part.has_relative_attention_bias = part.has_relative_attention_bias or _is_cross_attention(part)
    return PatchedAttention(tuple(before))


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
    """Attention as transformers calls it, [rows, tokens, heads, width]; of [rows, heads, tokens, width], keys with fewer heads.

    Raises PlanError for what torch's function does not know.
    """
    for name in UNSUPPORTED_ARGUMENTS:
        if more.get(name) is not None:
            text = f"attention takes '{name}', which F.scaled_dot_product_attention does not know"
            raise PlanError(
                text, fix="set mesh.cp = 1: no technique deals the tokens of this model", location="model"
            )
    causal = (_is_causal(module) if is_causal is None else is_causal) and attention_mask is None
    mask = attention_mask
    if position_bias is not None and not _is_cross_attention(module):
        if causal and not _has_relative_bias(module):
            text = (
                "attention is causal by a flag, and adds a bias that somebody makes for its queries and keys"
            )
            raise PlanError(text, fix="give it a causal mask; or set mesh.cp = 1", location="model")
        mask, causal = (
            combine_bias_and_mask(position_bias, attention_mask),
            False,
        )  # a bias of `_rows` is causal itself
    grouped = query.shape[1] != key.shape[1]
    made = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=grouped,
    )
    return made.transpose(1, 2).contiguous(), None


def _is_causal(module: nn.Module) -> bool:
    """What the module says of itself; transformers takes one that says nothing as causal."""
    try:
        return bool(module.is_causal)
    except AttributeError:
        return True


def _has_relative_bias(module: nn.Module) -> bool:
    """Whether the module attends as T5's do."""
    known = {BIAS_FLAG, "is_decoder", "is_causal", "n_heads"} <= vars(module).keys()
    return known and type(module).__module__.startswith("transformers.") and _takes_offset(type(module))


@cache
def _takes_offset(kind: type[Any]) -> bool:
    """Whether modules of a kind make their bias for so many queries and keys, of which the first may stand anywhere."""
    made = inspect.getattr_static(kind, "compute_bias", None)
    return made is not None and list(inspect.signature(made).parameters)[1:] == [
        *("query_length", "key_length", "device", "past_seen_tokens")
    ]


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a module of T5's attends to an encoder: its bias is zeros."""
    return _has_relative_bias(module) and bool(module.is_decoder) and not module.is_causal


def _sharded_bias(
    module: Any,
    whole: Callable[..., torch.Tensor],
    ways: tuple[GetShards, SuspendModes, BiasCallback],
    query_length: int,
    key_length: int,
    **more: Any,
) -> torch.Tensor:
    """The bias of own queries and all keys, [1, heads, own, all]; a causal module's forbids what comes behind."""
    shares, aside, told = ways
    here = shares(query_length, key_length)
    if here is None and not _is_cross_attention(module):
        return whole(query_length, key_length, **more)
    length = key_length if here is None else here[1].length
    if here is None or _is_cross_attention(module):
        bias = _zero_scalar(module).expand(1, module.n_heads, query_length, length)
        told(bias)
        return bias
    share = here[0]
    with aside():
        line = whole(1, 2 * length - 1, device=more.get("device"), past_seen_tokens=length - 1)[0, :, 0]
        behind = torch.arange(length, device=line.device) - share.positions(line.device).unsqueeze(-1)
        places = behind + (length - 1)
        bias = line.index_select(1, places.flatten()).view(1, line.shape[0], *places.shape)
        if module.is_causal:
            bias = torch.where(behind <= 0, bias, torch.finfo(bias.dtype).min)
    told(bias)
    return bias


def _zero_scalar(module: nn.Module) -> torch.Tensor:
    """One number in the dtype of queries, for a bias that takes no memory."""
    weight = next(module.parameters())
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return torch.zeros((), dtype=dtype, device=weight.device)


def _patched_configs(module: nn.Module) -> dict[int, Any]:
    """Copies of the configs that parts of `module` hold, which name `attended`, by identity of what they stand for.

    What one config holds of another is a copy too. A config stays as it is where a model that holds it asks for the name itself.
    """
    holders: dict[int, list[type[Any]]] = {}
    found: dict[int, Any] = {}
    for part in module.modules():
        config = vars(part).get("config")
        if config is not None and type(config).__module__.startswith("transformers."):
            found[id(config)] = config
            if is_transformers_model(part):
                holders.setdefault(id(config), []).append(type(part))
    named = [
        each
        for each in found
        if found[each]._attn_implementation in SUPPORTED_ATTENTION
        and all(map(_pluggable, holders.get(each, [])))
    ]
    named = [each for each in named if each in holders and not found[each].output_attentions]
    if not named:
        return {}
    _register_attention()
    memo: dict[int, Any] = {}
    copies = {each: copy.deepcopy(config, memo) for each, config in found.items()}
    for each in named:
        copies[each]._attn_implementation_internal = ATTENTION_NAME
    return copies


@cache
def _pluggable(kind: type[Any]) -> bool:
    """Whether models of a kind can do with torch's function, and look it up by the name in their config."""
    known: Any = next(each for each in kind.__mro__ if each.__module__.startswith("transformers."))
    code = inspect.getsource(sys.modules[known.__module__])
    return bool(kind._supports_sdpa and known._can_set_attn_implementation()) and not SDPA_IN_CODE.search(
        code
    )


def _register_attention() -> None:
    """Have transformers know `attended` by its name; masks are made as for torch's function."""
    masks = transformers.masking_utils
    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sharded_attention)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, masks.sdpa_mask)
