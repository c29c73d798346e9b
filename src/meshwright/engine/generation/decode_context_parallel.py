"""Decode context parallelism: the keys and values of each sequence are divided over ranks, column by column.

Ranks that each have whole sequences cannot continue one whose cache does not fit on a rank. Here all ranks
along the axes of tokens (cp) have the same sequences and tokens, as tp ranks do, and each keeps every P-th
column of the batch.

    columns      0   1   2   3   4   5   6         newest = 6
    tokens     [ -   a   a   a   a   a   a ]
               [ b   b   b   b   b   b   b ]
    rank 0       x           x           x         columns with number % 3 == 0
    rank 1           x           x
    rank 2               x           x             rank 1 appends column 7

    prefill    each rank computes the prompt whole, and keeps its own columns of each layer
    decode     attention of the new token to the rank's own columns, merged over ranks by log-sum-exp

Columns are numbered by the newest one, which is the last of every sequence. So a column keeps its number,
and its rank, when sequences leave, when unneeded columns are dropped on the left, and when a prompt joins:
its last column takes the number of the newest one that runs. A layer with a sliding window does not grow,
and lies whole on every rank.

    sent per rank, token and divided layer    (P - 1) r H (e x element size + size of lse)
    memory                                    1/P of the columns; all, of a layer that takes in a prompt
    computed                                  the prompt on every rank: a prefill is not divided

r rows, H query heads of this rank, e features of a value; lse has 4 bytes, 8 in float64. Ranks may round a
prompt differently, so the tokens of the first are those of all: a broadcast of 8 r bytes.

Limits: attention must receive what the cache returns. A model that changes it first (latent vectors) is
refused, and so are recurrent states.
In vLLM token i of a sequence lies on rank i % P; here columns, so that padding on the left needs no exchange.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.comm.collectives.group import Group
from meshwright.engine.runtime.rank_state import RankState
from meshwright.model.context_parallel.attention_call import DecodeAttentionImpl, SDPAArguments
from meshwright.model.context_parallel.patch_hf_attention import attends_by_name, patch_attention
from meshwright.model.hf.declared_tp_plan import generation_model
from meshwright.plan.job.errors import Diagnostic, PlanError, raise_diagnostics
from meshwright.plan.sharding.sharding_plan import ShardingPlan

OPTION = "decode_context_parallel"
WITHOUT = f"leave {OPTION} out: each rank along cp then has whole sequences, and prompts of its own"
LOCATION = "generate"
NO_AXIS = f"{OPTION} = True, and the plan shards no sequence: the cache would be divided over one rank"
NO_AXIS_FIX = f"plan with mesh.cp > 1, or leave {OPTION} out"
# fields of configs -> what the layers of such a model do
UNDIVIDED_SETTINGS = {
    "kv_lora_rank": "its layers cache a latent vector for all heads, and attend to keys that they make of it",
    "num_kv_shared_layers": "its layers attend to keys of other layers",
}
DynamicLayer = transformers.cache_utils.DynamicLayer
WHOLE_LAYERS = (transformers.cache_utils.DynamicSlidingWindowLayer,)  # which do not grow


class OwnedColumns:
    """Tells which columns of a batch lie on the rank at `index` of `num_ranks`.

    `newest` is the number of the last column, in which every sequence has its newest token.
    """

    def __init__(self, index: int, num_ranks: int, newest: int) -> None:
        self._index, self._num_ranks, self.newest = index, num_ranks, newest

    def places(self, num_columns: int) -> slice:
        """Returns where, of the last `num_columns` columns, those of this rank are."""
        first = (self._index - (self.newest - num_columns + 1)) % self._num_ranks
        return slice(first, num_columns, self._num_ranks)

    def count(self, num_columns: int) -> int:
        """Returns how many of the last `num_columns` columns lie on this rank."""
        places = self.places(num_columns)
        return len(range(places.start, places.stop, places.step))


class ColumnShardLayer(DynamicLayer):
    """A layer of a cache of transformers that keeps the `columns` of this rank: keys and values are
    (sequences, heads, own columns, head dim). `attention` is told which keys it returns.
    """

    def __init__(self, columns: OwnedColumns, attention: "ColumnShardAttention") -> None:
        super().__init__()
        self.columns, self._attention = columns, attention
        self.cumulative_length = 0  # columns on all ranks

    def get_seq_length(self) -> int:
        """Returns the number of columns on all ranks, which masks and positions have."""
        return self.cumulative_length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in the newest columns. Returns what attention reads: all of a prompt, else this rank's."""
        kept_keys, kept_values, num_new = self.keys, self.values, key_states.shape[-2]
        self.cumulative_length += num_new
        places = self.columns.places(num_new)
        keys, values = key_states[:, :, places], value_states[:, :, places]
        if kept_keys is None or kept_values is None:  # a prompt
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = keys.clone(), values.clone()  # the others are freed behind attention
            self._attention.expect(key_states)
            return key_states, value_states
        if keys.shape[-2]:
            kept_keys, kept_values = torch.cat([kept_keys, keys], -2), torch.cat([kept_values, values], -2)
            self.keys, self.values = kept_keys, kept_values
        self._attention.expect(kept_keys, self)
        return kept_keys, kept_values


class ColumnShardAttention(TorchFunctionMode):
    """While active, attention to the keys of a layer that has some of the columns is that to all of them."""

    def __init__(self, attention_fn: DecodeAttentionImpl) -> None:
        super().__init__()
        self._attention_fn = attention_fn
        # by id of the keys, which live as long as a layer does
        self._layers = dict[int, ColumnShardLayer]()
        self._unattended = set[int]()

    def expect(self, keys: torch.Tensor, layer: ColumnShardLayer | None = None) -> None:
        """Makes attention to `keys`, in this forward, that to all columns of `layer`; None: these are all."""
        self._unattended.add(id(keys))
        if layer is not None:
            self._layers[id(keys)] = layer

    def begin_forward(self) -> None:
        """Begins a forward."""
        self._layers.clear()
        self._unattended.clear()

    def check_attended(self) -> None:
        """Raises PlanError if, in this forward, attention has not received what a layer has returned."""
        if self._unattended:
            text = f"{OPTION} = True, and attention of the model does not receive the keys that its cache "
            text += f"returns, in {len(self._unattended)} layers"
            raise PlanError(text, fix=WITHOUT, location="model")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        arguments = SDPAArguments(*args, **(kwargs or {}))
        self._unattended.discard(id(arguments.key))
        layer = self._layers.get(id(arguments.key))
        if layer is None:
            return _attention_to_all(arguments)
        if arguments.query.shape[-2] != 1 or arguments.dropout_p:
            text = f"{OPTION} = True, and attention behind a prompt has {arguments.query.shape[-2]} queries "
            text += f"and dropout {arguments.dropout_p}; needed is one query, and none"
            raise PlanError(text, fix=WITHOUT, location="model")
        return self._attention_fn(_with_own_columns(arguments, layer))


def _with_own_columns(arguments: SDPAArguments, layer: ColumnShardLayer) -> SDPAArguments:
    """Returns the arguments with the columns of the mask that lie on this rank."""
    mask, num_columns = arguments.attn_mask, layer.cumulative_length
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], num_columns)[..., layer.columns.places(num_columns)]
    query, key, value = arguments.tensors[:3]
    return SDPAArguments(query, key, value, mask, scale=arguments.score_scale)


def _attention_to_all(arguments: SDPAArguments) -> torch.Tensor:
    """Returns torch's attention; one query is the newest token, and sees all keys."""
    is_causal = arguments.is_causal and arguments.query.shape[-2] > 1
    query, key, value = arguments.tensors[:3]
    rest = arguments.attn_mask, arguments.dropout_p, is_causal
    how = {"scale": arguments.scale, "enable_gqa": arguments.enable_gqa}
    return F.scaled_dot_product_attention(query, key, value, *rest, **how)


class CacheDivision:
    """Caches of `model` whose columns are divided over the ranks of `group`, and forwards with them."""

    def __init__(self, module: nn.Module, group: Group, attention_fn: DecodeAttentionImpl) -> None:
        self._module, self._model, self.group = module, generation_model(module), group
        self._attention = ColumnShardAttention(attention_fn)

    @contextmanager
    def patched_attention(self) -> Iterator[None]:
        """Makes the attention of the model one that `forward` can divide."""
        patched = patch_attention(self._module, lambda queries, keys: None)
        try:
            yield
        finally:
            patched.restore()

    def empty_cache(self, num_columns: int, running: Any) -> Any:
        """Returns a cache for prompts of `num_columns` columns, whose sequences will join those of `running`;
        None: there are none.
        """
        columns = None if running is None else _columns_of(running)
        if columns is None:
            columns = OwnedColumns(self.group.index, self.group.size, num_columns - 1)
        cache = _model_cache(self._model)
        cache.layers = [
            ColumnShardLayer(columns, self._attention) if type(layer) is DynamicLayer else layer
            for layer in cache.layers
        ]
        return cache

    def add_column(self, cache: Any) -> None:
        """Makes the next column of `cache` the newest one."""
        columns = _columns_of(cache)
        if columns is not None:
            columns.newest += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Attends to all columns within, in one forward. Raises PlanError if a layer could not."""
        self._attention.begin_forward()
        with self._attention:
            yield
        self._attention.check_attended()


def make_cache_division(state: RankState) -> CacheDivision:
    """Returns the division over the ranks along the axes of tokens. Raises PlanError if it cannot work."""
    module, sharding = state.trained_module.module, state.plan.sharding
    raise_diagnostics(division_diagnostics(module, sharding))
    attention_fn = state.sequence_runner.decode_attention
    if attention_fn is None:
        raise PlanError(NO_AXIS, fix=NO_AXIS_FIX, location=LOCATION)
    return CacheDivision(module, state.world.group(sharding.token_axes), attention_fn)


def division_diagnostics(module: nn.Module, sharding: ShardingPlan) -> Iterator[Diagnostic]:
    """Yields why the cache of `module` cannot be divided over the ranks along the axes of tokens."""
    if sharding.mesh.group_size(sharding.token_axes) == 1:
        yield Diagnostic(NO_AXIS, NO_AXIS_FIX, LOCATION)
        return
    model, name = generation_model(module), type(module).__name__
    if model is None:
        text = f"{OPTION} = True, and {name} is no transformers model: it has no cache of keys and values"
        yield Diagnostic(text, WITHOUT, LOCATION)
        return
    config = model.config.get_text_config(decoder=True)
    for index, layer in enumerate(_model_cache(model).layers):
        if type(layer) not in (DynamicLayer, *WHOLE_LAYERS):
            text = (
                f"{OPTION} = True, and layer {index} of {name} caches {type(layer).__name__}, which is not "
            )
            yield Diagnostic(f"{text}of keys and values alone", WITHOUT, LOCATION)
            break
    for setting, meaning in UNDIVIDED_SETTINGS.items():
        if vars(config).get(setting):
            text = f"{OPTION} = True, and {name} has {setting} = {vars(config)[setting]}: {meaning}"
            yield Diagnostic(text, WITHOUT, LOCATION)
    if not attends_by_name(model):
        text = (
            f"{OPTION} = True, and {name} has attention of its own ('{config._attn_implementation}'), whose "
        )
        yield Diagnostic(f"{text}outputs cannot be merged", WITHOUT, LOCATION)


def _columns_of(cache: Any) -> OwnedColumns | None:
    """Returns the columns that the layers of `cache` share; None if none is divided."""
    return next((each.columns for each in cache.layers if isinstance(each, ColumnShardLayer)), None)


def _model_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
