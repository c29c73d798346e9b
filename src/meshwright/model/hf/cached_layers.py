"""Finds what each layer of a transformers model caches of a sequence, by one forward on fake tensors.

The cache is the one that the model makes, so any kind that transformers knows is described: keys and values
of all heads or of groups, of a window, without heads, and recurrent states. Layers belong to the block with a
module of their `layer_idx`.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.hf.declared_tp_plan import generation_model
from meshwright.plan.model_spec.kv_cache_spec import CachedLayer

logger = logging.getLogger(__name__)

TRIAL_DTYPE = torch.bfloat16  # what has another one has it in every job
NUM_SAMPLES, NUM_TOKENS = 2, 3


def find_cached_layers(
    module: nn.Module, blocks: Mapping[str, nn.Module], mode: FakeTensorMode
) -> tuple[CachedLayer, ...] | None:
    """Returns what the layers of `module` cache, whose parameters are fakes of `mode` in TRIAL_DTYPE: nothing
    for a module without a cache; None if it cannot be found.
    """
    model = generation_model(module)
    if model is None:
        return ()
    if not model.can_generate() or model.config.is_encoder_decoder:
        return None
    try:
        with mode, torch.no_grad():
            ids = torch.zeros(NUM_SAMPLES, NUM_TOKENS, dtype=torch.int64)
            outputs = module.eval()(input_ids=ids, use_cache=True)
    except Exception as error:  # the bytes are then not checked, which is said; the model may still generate
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        logger.warning("what %s caches of a sequence is not known: %s", type(model).__name__, said)
        return None
    caches = [outputs[name] for name in ("past_key_values", "cache_params") if name in outputs]
    if not caches:
        return ()
    blocks_by_index = {
        vars(part)["layer_idx"]: name
        for name, block in blocks.items()
        for part in block.modules()
        if "layer_idx" in vars(part)
    }
    found = [(blocks_by_index.get(index), vars(layer)) for index, layer in enumerate(caches[0].layers)]
    found = [(block, fields) for block, fields in found if any(True for _ in _tensors(fields))]
    if any(block is None for block, _ in found):
        return None
    return tuple(_describe(str(block), fields) for block, fields in found)


def _describe(block: str, fields: dict[str, Any]) -> CachedLayer:
    keys, values = (_tensor(fields, name) for name in ("keys", "values"))
    shared = _tensor(fields, "indexer_keys")
    per_token = 0 if keys is None or values is None else (keys.numel() + values.numel()) // keys.shape[2]
    return CachedLayer(
        block,
        1 if keys is None else keys.shape[1],
        per_token // NUM_SAMPLES,
        0 if shared is None else shared.numel() // shared.shape[1] // NUM_SAMPLES,
        fields.get("sliding_window") or 0,
        "" if keys is None else _dtype(keys),
        tuple((state.numel() // NUM_SAMPLES, _dtype(state)) for state in _states(fields)),
    )


def _tensors(fields: dict[str, Any]) -> Iterator[torch.Tensor]:
    yield from (tensor for name in ("keys", "values") if (tensor := _tensor(fields, name)) is not None)
    yield from _states(fields)


def _tensor(fields: dict[str, Any], name: str) -> torch.Tensor | None:
    tensor = fields.get(name)
    return tensor if isinstance(tensor, torch.Tensor) and tensor.numel() else None


def _states(fields: dict[str, Any]) -> Iterator[torch.Tensor]:
    for name in ("conv_states", "recurrent_states"):
        yield from (state for state in fields.get(name, {}).values() if isinstance(state, torch.Tensor))


def _dtype(tensor: torch.Tensor) -> str:
    return "" if tensor.dtype == TRIAL_DTYPE else str(tensor.dtype).removeprefix("torch.")
