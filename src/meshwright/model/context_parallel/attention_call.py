"""Intercepts torch's attention on a sequence shard: calls of `F.scaled_dot_product_attention` inside blocks
go to a context-parallel strategy.

Models with a fused kernel call this function, transformers' models among them. A block calls it with the
tokens of this rank only, while the keys lie on all ranks:

    query, key, value    [.., heads, tokens, head dim]  tokens of this rank
    mask                 [.., queries, keys]            rows: queries of this rank, columns: all keys in order
    causal               by position in the sequence, not by position on this rank
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from meshwright.model.context_parallel.token_shard import TokenShard
from meshwright.model.tensors.function_modes import CallFunction, call_unchanged
from meshwright.plan.model_spec.sequence_info import AttentionMaskSpec
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS


@dataclass(frozen=True)
class SDPAArguments:
    """The arguments of F.scaled_dot_product_attention by name: `SDPAArguments(*args, **kwargs)`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the arguments."""
        arguments = (self.query, self.key, self.value, self.attn_mask)
        return tuple(each for each in arguments if each is not None)


BIAS_AND_MASK = "superposed_of"  # attribute of a combined mask


def combine_bias_and_mask(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns a bias with the mask applied; `split_bias_and_mask` gives both back."""
    if mask is None:
        return bias
    output = torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
    vars(output)[BIAS_AND_MASK] = bias, mask
    return output


def split_bias_and_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the bias and the mask that `combine_bias_and_mask` combined; None for any other mask."""
    return vars(mask).get(BIAS_AND_MASK)


@dataclass(frozen=True)
class ShardedAttentionCall:
    """One attention call on a sequence shard.

    `query_shard` and `key_shard` tell which tokens this rank has; `scale` is that of the scores. If glue
    made the mask, equal for all heads, `group_mask_rows` are its rows for the queries of all ranks that
    exchange heads (token_shard.py). If a block has added that mask to its own `bias` of the local queries,
    both are given.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    query_shard: TokenShard
    key_shard: TokenShard
    group_mask_rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def describe_mask(mask: torch.Tensor | None) -> AttentionMaskSpec | None:
    """Returns what the plan needs to know about a mask [.., queries, keys]."""
    if mask is None:
        return None
    rows, heads, queries = (size > 1 for size in (*[1] * (4 - mask.ndim), *mask.shape)[-4:-1])
    return AttentionMaskSpec(
        rows, heads, queries, is_additive=mask.dtype != torch.bool, needs_grad=mask.requires_grad
    )


# -> [.., heads, local queries, value head dim]
AttentionImpl = Callable[[ShardedAttentionCall], torch.Tensor]
# of queries that all ranks have, to keys of which each has some -> [samples, heads, queries, value head dim]
DecodeAttentionImpl = Callable[[SDPAArguments], torch.Tensor]


class AttentionMode(TorchFunctionMode):
    """While active, attention inside blocks (`is_in_block()`) runs `attention_impl`; `next_shards()` are its
    queries and keys. `call` runs all of it: a compiler's, between two graphs.
    """

    def __init__(
        self,
        attention_impl: AttentionImpl,
        next_shards: Callable[[], tuple[TokenShard, TokenShard]],
        is_in_block: Callable[[], bool],
        call: CallFunction = call_unchanged,
    ) -> None:
        super().__init__()
        self._attention_impl, self._next_shards, self._is_in_block = attention_impl, next_shards, is_in_block
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._call(self._attention, args, kwargs or {})

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._is_in_block():
            return F.scaled_dot_product_attention(*args, **kwargs)
        arguments = SDPAArguments(*args, **kwargs)
        queries, keys = self._next_shards()
        query, key, value, mask = arguments.query, arguments.key, arguments.value, arguments.attn_mask
        bias, group_mask_rows = _split_mask(mask, queries)
        num_padding = max(0, MIN_TOKENS - queries.num_tokens)
        if num_padding:  # padding attends to nothing
            query = query[..., : queries.num_tokens, :]
            mask, bias = (_first_queries(each, queries.num_tokens) for each in (mask, bias))
        if keys.num_tokens < MIN_TOKENS:  # and nothing attends to padding
            key, value = key[..., : keys.num_tokens, :], value[..., : keys.num_tokens, :]
        options = (
            arguments.dropout_p,
            arguments.is_causal,
            arguments.score_scale,
            queries,
            keys,
            group_mask_rows,
            bias,
        )
        output = self._attention_impl(ShardedAttentionCall(query, key, value, mask, *options))
        return F.pad(output, (0, 0, 0, num_padding)) if num_padding else output


def _split_mask(
    mask: torch.Tensor | None, queries: TokenShard
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns `bias` and `group_mask_rows` of a mask, as in `ShardedAttentionCall`."""
    if mask is None:
        return None, None
    bias, mask_without_bias = split_bias_and_mask(mask) or (None, mask)
    is_per_head = mask_without_bias.ndim > 2 and mask_without_bias.shape[-3] > 1  # heads may be sharded
    group_mask_rows = None if is_per_head else queries.group_mask_rows(mask_without_bias)
    return (None if group_mask_rows is None else bias), group_mask_rows


def _first_queries(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return mask[..., :count, :] if mask is not None and mask.shape[-2] > 1 else mask
