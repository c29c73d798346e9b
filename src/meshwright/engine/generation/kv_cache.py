"""Changes which sequences, and how many columns, a cache of transformers has: sequences come and go.

    select_sequences [0 2]         drop_columns 1                 join
    [ - a a ]                                                     [ a a a ]
    [ b b b ]  -->  [ - a a ]      [ - a a ]  -->  [ a a ]        [ - - d ]
    [ - - c ]       [ - - c ]      [ - - c ]       [ - c ]

A column is a position of the running batch, and the newest token of every sequence is in the last one;
shorter sequences are padded on the left, and a mask hides the padding. Layers of a sliding window of W keep
the last W - 1 columns. A recurrent state has no columns. Where columns are divided over ranks
(decode_context_parallel.py), a layer keeps this rank's, of which there may be none.

A layer of another pipeline rank has one NaN, which stands for all of its numbers and needs no memory.
"""

from collections.abc import Iterator, Sequence
from math import nan
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.engine.generation.decode_context_parallel import ColumnShardLayer
from meshwright.model.hf.declared_tp_plan import generation_model

TOKEN_DIMS = {"keys": 2, "values": 2, "indexer_keys": 1, "indexer_position_ids": 2}
STATES = "conv_states", "recurrent_states"  # of recurrent layers, tables of tensors
POSITIONS = "indexer_position_ids"  # (dims of a position, sequences, tokens); others begin with sequences
STANDS_IN = "stands_in"  # a field of layers of other ranks

_cache_utils = transformers.cache_utils
KEY_VALUE_LAYERS = _cache_utils.DynamicLayer, _cache_utils.DynamicSlidingWindowLayer
LAYERS = (
    *KEY_VALUE_LAYERS,
    ColumnShardLayer,
    _cache_utils.DynamicIndexedLayer,
    _cache_utils.LinearAttentionLayer,
    _cache_utils.LinearAttentionAndFullAttentionLayer,
    _cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    _cache_utils.DummyLayer,
)


def caches_keys_and_values(module: nn.Module) -> bool:
    """Returns whether all layers of the cache of a transformers model have keys and values alone; True for a
    module that has no cache.
    """
    model = generation_model(module)
    if model is None:
        return True
    config = model.config.get_text_config(decoder=True)
    return all(type(layer) in KEY_VALUE_LAYERS for layer in transformers.DynamicCache(config=config).layers)


def can_join(cache: Any) -> bool:
    """Returns whether everything that `cache` contains is known here."""
    return type(cache) is transformers.DynamicCache and all(type(each) in LAYERS for each in cache.layers)


def select_sequences(cache: Any, indices: Sequence[int]) -> None:
    """Keeps the sequences at `indices`, in this order; one that is named twice is copied."""
    for layer in cache.layers:
        for each in _tensors(layer):
            tensor = each.table[each.key]
            index = torch.tensor(indices, device=tensor.device)
            each.replace(tensor.index_select(each.batch_dim, index))


def drop_columns(cache: Any, num_columns: int) -> None:
    """Drops the first `num_columns` columns."""
    for layer in cache.layers if num_columns else ():
        before = _num_columns(layer)
        for each in _tensors(layer):
            if each.token_dim is not None:
                tensor = each.table[each.key]
                kept = min(_num_kept(layer, before - num_columns), tensor.shape[each.token_dim])
                each.replace(tensor.narrow(each.token_dim, tensor.shape[each.token_dim] - kept, kept).clone())
        _set_num_columns(layer, before - num_columns)


def join(first: Any, second: Any, num_columns: int) -> None:
    """Adds the sequences of `second` to `first`; both get `num_columns` columns. `second` is emptied."""
    for layer, other in zip(first.layers, second.layers, strict=True):
        for each, added in zip(list(_tensors(layer)), list(_tensors(other)), strict=True):
            both = each.table[each.key], added.table.pop(added.key)
            if each.token_dim is not None:
                kept = _num_kept(layer, num_columns)
                both = tuple(_pad_left(tensor, each.token_dim, kept) for tensor in both)
            each.replace(torch.cat(both, each.batch_dim))
        _set_num_columns(layer, num_columns)


def release_unused(cache: Any) -> None:
    """Frees the memory of columns that layers of a sliding window have seen and do not keep."""
    for layer in cache.layers:
        for each in _tensors(layer):
            tensor = each.table[each.key]
            if not isinstance(tensor, FakeTensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
                each.replace(tensor.clone())


def fill_missing_columns(layer: Any, num_sequences: int, num_columns: int, device: torch.device) -> None:
    """Makes a layer that no block has filled as long as the others, with NaN and without memory."""
    if layer.get_seq_length() < num_columns:
        empty = torch.full((), nan, device=device)
        if not layer.is_initialized:
            layer.lazy_initialization(empty, empty)
            vars(layer)[STANDS_IN] = True
        layer.keys = layer.values = empty.expand(num_sequences, 1, _num_kept(layer, num_columns), 1)
        _set_num_columns(layer, num_columns)


def cache_nbytes(cache: Any) -> int:
    """Returns the bytes of memory behind all tensors of `cache` on this rank; 0 for None."""
    storages = {}
    for layer in [] if cache is None else cache.layers:
        for each in _tensors(layer):
            tensor = each.table[each.key]
            if not (isinstance(tensor, FakeTensor) or each.stands_in):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _CachedTensor(NamedTuple):
    """One tensor of a layer, `table[key]`, and its dims; it may only stand for that of another rank."""

    table: dict[Any, Any]
    key: Any
    batch_dim: int
    token_dim: int | None
    stands_in: bool

    def replace(self, tensor: torch.Tensor) -> None:
        """Puts `tensor` in its place."""
        if self.stands_in:
            tensor = tensor.new_full((), nan).expand(tensor.shape)
        self.table[self.key] = tensor


def _tensors(layer: Any) -> Iterator[_CachedTensor]:
    fields = vars(layer)
    for name, token_dim in TOKEN_DIMS.items():
        if isinstance(fields.get(name), torch.Tensor) and fields[name].ndim > 1:
            batch_dim = 1 if name == POSITIONS else 0
            yield _CachedTensor(fields, name, batch_dim, token_dim, STANDS_IN in fields)
    for name in STATES:
        for key, state in fields.get(name, {}).items():
            if isinstance(state, torch.Tensor):
                yield _CachedTensor(fields[name], key, 0, None, STANDS_IN in fields)


def _pad_left(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (size - tensor.shape[dim], 0))


def _num_kept(layer: Any, num_columns: int) -> int:
    """Returns how many of the last `num_columns` columns `layer` keeps."""
    if isinstance(layer, ColumnShardLayer):
        return layer.columns.count(num_columns)
    window = vars(layer).get("sliding_window")
    return num_columns if window is None else min(num_columns, window - 1)


def _num_columns(layer: Any) -> int:
    return layer.get_seq_length() if any(each.token_dim is not None for each in _tensors(layer)) else 0


def _set_num_columns(layer: Any, num_columns: int) -> None:
    if "cumulative_length" in vars(layer):
        layer.cumulative_length = num_columns
