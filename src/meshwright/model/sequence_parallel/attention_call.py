"""Attention where each rank has some of the tokens: whoever calls torch's is answered by a technique.

`F.scaled_dot_product_attention` is where models come to that attend in a fused kernel, transformers' among them. Within a block
it is asked for with the tokens of this rank alone, and what it looks at lies on all ranks:

    query, key, value    [.., heads, tokens, width]     this rank's tokens
    mask                 [.., queries, keys]            rows of this rank's queries, columns of all keys, in their order
    causal               by positions in the sample, not by places on this rank

What torch's attention is called with; a mask that is a bias less what another mask forbids remembers both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from meshwright.model.sequence_parallel.token_shard import TokenShard
from meshwright.plan.model_spec.sequence_info import MIN_TOKENS, AttentionMaskSpec


@dataclass(frozen=True)
class SDPAArguments:
    """The arguments of F.scaled_dot_product_attention, by its names: `Attention(*args, **kwargs)`."""

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
        """What scores are multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors among them."""
        given = (self.query, self.key, self.value, self.attn_mask)
        return tuple(each for each in given if each is not None)


BIAS_AND_MASK = "superposed_of"  # the attribute of a mask that was made of two


def combine_bias_and_mask(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """A bias, less what a mask forbids; `parts` tells both."""
    if mask is None:
        return bias
    made = torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
    vars(made)[BIAS_AND_MASK] = bias, mask
    return made


def split_bias_and_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The bias, and the mask, of which `superposed` has made this one; None of any other."""
    return vars(mask).get(BIAS_AND_MASK)


@dataclass(frozen=True)
class ShardedAttentionCall:
    """One call of attention. `queries` and `keys` say which tokens this rank has of both; `scale` is that of the scores.

    Where glue has made the mask, for all heads alike, `together` are its rows of the queries of all ranks that exchange heads
    (model/share.py). Where a block has laid that mask over a `bias` of its own, rows of own queries, both are told.
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
    """What the plan needs to know of a mask, [.., queries, keys]."""
    if mask is None:
        return None
    rows, heads, queries = (size > 1 for size in (*[1] * (4 - mask.ndim), *mask.shape)[-4:-1])
    return AttentionMaskSpec(
        rows, heads, queries, is_additive=mask.dtype != torch.bool, needs_grad=mask.requires_grad
    )


AttentionImpl = Callable[[ShardedAttentionCall], torch.Tensor]  # [.., heads, own queries, width of values]


class AttentionMode(TorchFunctionMode):
    """While active, attention within blocks, as `inside()` tells, is `answer`; `shares()` are queries and keys of the call."""

    def __init__(
        self,
        attention_impl: AttentionImpl,
        next_shards: Callable[[], tuple[TokenShard, TokenShard]],
        is_in_block: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._attention_impl, self._next_shards, self._is_in_block = attention_impl, next_shards, is_in_block

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention or not self._is_in_block():
            return func(*args, **(kwargs or {}))
        return self._call_impl(SDPAArguments(*args, **(kwargs or {})))

    def _call_impl(self, given: SDPAArguments) -> torch.Tensor:
        queries, keys = self._next_shards()
        query, key, value, mask = given.query, given.key, given.value, given.attn_mask
        bias, together = _split_mask(mask, queries)
        idle = max(0, MIN_TOKENS - queries.num_tokens)
        if idle:  # what stands in attends to nothing
            query = query[..., : queries.num_tokens, :]
            mask, bias = (_first_queries(each, queries.num_tokens) for each in (mask, bias))
        if keys.num_tokens < MIN_TOKENS:  # and nobody to it
            key, value = key[..., : keys.num_tokens, :], value[..., : keys.num_tokens, :]
        said = given.dropout_p, given.is_causal, given.score_scale, queries, keys, together, bias
        made = self._attention_impl(ShardedAttentionCall(query, key, value, mask, *said))
        return F.pad(made, (0, 0, 0, idle)) if idle else made


def _split_mask(
    mask: torch.Tensor | None, queries: TokenShard
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The `bias` of a mask, and `together`, as `Asked` has them."""
    if mask is None:
        return None, None
    bias, known = split_bias_and_mask(mask) or (None, mask)
    by_head = known.ndim > 2 and known.shape[-3] > 1  # ranks may have some of them
    together = None if by_head else queries.group_mask_rows(known)
    return (None if together is None else bias), together


def _first_queries(mask: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return mask[..., :count, :] if mask is not None and mask.shape[-2] > 1 else mask
