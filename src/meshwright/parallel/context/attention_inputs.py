"""Inputs of one attention call in four dims, and the geometry of a ring: its ranks, messages and blocks of
queries and keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch

from meshwright.model.context_parallel.attention_call import ShardedAttentionCall
from meshwright.model.rng.sharded_draws import DrawRegion
from meshwright.model.rng.stateless_dropout import keep_mask as thinned
from meshwright.model.tensors.select_token_ranges import span_positions
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.sequence_sharding import TokenRange, num_positions


@dataclass(frozen=True)
class AttentionInputs:
    """query [B, H, n, d], key [B, G, m, d], value [B, G, m, e] and mask of one attention call; the mask may
    be None.

    The mask is [B or 1, H or 1, n or 1, all keys]. `output_shape` is the shape of the output in the dims of
    the call. Attention weights are dropped with probability `dropout_p`. `gathered_mask` and `bias` are those
    of the call, in the dims of the mask.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    output_shape: tuple[int, ...]
    dropout_p: float = 0.0
    gathered_mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def restore_shape(self, out: torch.Tensor) -> torch.Tensor:
        """Returns `out`, [B, H, n, e], in the dims of the call."""
        return out.reshape(self.output_shape)


def attention_inputs(call: ShardedAttentionCall, name: str) -> AttentionInputs:
    """Returns the inputs of `call` in four dims, for the strategy `name`.

    Raises:
        PlanError: queries, keys or the mask are not those of this rank's tokens.
    """
    location = f"strategies.{name}"
    query, key, value = (_autocast(each) for each in (call.query, call.key, call.value))
    mask = None if call.mask is None else _autocast(call.mask)
    for what, tensor, share in (
        ("queries", query, call.query_shard),
        ("keys", key, call.key_shard),
        ("values", value, call.key_shard),
    ):
        if tensor.shape[-2] != share.num_tokens:
            text = (
                f"attention gets {tensor.shape[-2]} {what}, and this rank has {share.num_tokens} of "
                f"{share.length} tokens"
            )
            raise PlanError(
                text, fix="attend to the tokens of the sample alone, or set mesh.cp = 1", location=location
            )
    if mask is not None:
        keys = call.key_shard.length
        if (
            call.is_causal
            or mask.shape[-1] not in (keys, 1)
            or mask.shape[-2] not in (call.query_shard.num_tokens, 1)
        ):
            text = (
                f"the mask is of shape {list(mask.shape)}; needed are rows for "
                f"{call.query_shard.num_tokens} queries of this rank"
            )
            fix = (
                "give the block a mask of shape [samples, heads, tokens, tokens], made outside of it; and "
                "is_causal = False"
            )
            raise PlanError(f"{text}, and columns for all {keys} keys", fix=fix, location=location)
    mask, together, bias = (
        _mask_to_4d(each, query, call.key_shard.length) for each in (mask, call.group_mask_rows, call.bias)
    )
    shape = (*query.shape[:-1], value.shape[-1])
    return AttentionInputs(
        _to_4d(query), _to_4d(key), _to_4d(value), mask, shape, call.dropout_p, together, bias
    )


def dropout_keep_mask(
    call: ShardedAttentionCall, query_spans: tuple[TokenRange, ...], heads: TokenRange | None = None
) -> torch.Tensor | None:
    """Returns the attention weights that dropout keeps for the queries in `query_spans`, bool [B, H, n, all
    keys]; None without dropout.

    It equals the draw of one device. `heads` is the range of query heads on this rank, if it has only some.
    """
    if not call.dropout_p:
        return None
    before = call.query.shape[:-2]
    part = DrawRegion(
        (*before, call.query_shard.length, call.key_shard.length),
        (*(((-3, (heads,)),) if heads else ()), (-2, query_spans)),
    )
    return _to_4d(thinned(call.query, part, call.dropout_p))


def _mask_to_4d(mask: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    if mask is None:
        return None
    before = mask.shape[:-2] if query.ndim <= 4 else query.shape[:-2]
    mask = mask.expand(*before, mask.shape[-2], keys)
    return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape) if mask.ndim <= 4 else mask.flatten(0, -4)


def _to_4d(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim < 4:
        return tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    kind = tensor.device.type
    casts = tensor.is_floating_point() and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


MaskKind = Literal["all", "causal", "some"]


class PendingTransfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Returns when the received tensor is complete and the sent one may be overwritten."""


ShiftFn = Callable[
    [torch.Tensor, torch.Tensor], PendingTransfer
]  # fills the first with what the rank before sends, of the second to the next


@dataclass(frozen=True, eq=False)
class AttentionRing:
    """The ranks of a ring, seen from the one at `index`: the positions of its own queries, and of the keys of
    every rank.

    `causal`: a query attends to keys at its position and before. Keys and values travel in `comm_dtype`;
    None: in their own. Dropout drops attention weights with probability `dropout_p`.
    """

    index: int
    query_spans: tuple[TokenRange, ...]
    key_spans: tuple[tuple[TokenRange, ...], ...]
    scale: float
    causal: bool
    shift: ShiftFn
    comm_dtype: torch.dtype | None = None
    dropout_p: float = 0.0

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(map(num_positions, self.key_spans))

    @property
    def max_keys(self) -> int:
        """The number of keys of the rank with most keys."""
        return max(self.num_keys)

    @cached_property
    def key_positions(self) -> tuple[np.ndarray, ...]:
        """The positions of the keys of every rank, ascending."""
        return tuple(map(span_positions, self.key_spans))

    @cached_property
    def query_positions(self) -> np.ndarray:
        """The positions of this rank's queries, ascending."""
        return span_positions(self.query_spans)


@dataclass(frozen=True)
class QueryKeyBlock:
    """A range of this rank's queries and of one rank's keys, both local, of some samples (None: of all).

    Its `kind` selects the mask: none ("full"), the kernel's own ("causal": query i attends to keys up to i),
    or a mask tensor ("partial").
    """

    queries: TokenRange
    keys: TokenRange
    kind: MaskKind
    samples: TokenRange | None = None

    @property
    def query_index(self) -> tuple[slice, slice, slice]:
        """The index of the queries in [samples, heads, queries, ..]."""
        return self._sample_index, slice(None), slice(*self.queries)

    @property
    def key_index(self) -> tuple[slice, slice, slice]:
        """The index of the keys in [samples, heads, keys, ..]."""
        return self._sample_index, slice(None), slice(*self.keys)

    @property
    def _sample_index(self) -> slice:
        return slice(None) if self.samples is None else slice(*self.samples)


class BlockMask(Protocol):
    """The keys that this rank's queries attend to, as blocks."""

    def blocks(self, rank: int) -> Sequence[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of `rank` that are computed."""

    def dense_mask(
        self, rank: int, block: QueryKeyBlock, full_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """Returns the mask of a block, [samples or 1, heads or 1, queries or 1, keys], cut from `full_mask`;
        None if it needs none.
        """

    def row_offset(self, queries: TokenRange) -> torch.Tensor | None:
        """Returns the offset of the scores of these queries, [samples or 1, heads or 1, queries or 1, 1];
        None: 0 everywhere.
        """

    def add_mask_grad(
        self, rank: int, block: QueryKeyBlock, grad: torch.Tensor, mask_grad: torch.Tensor
    ) -> None:
        """Adds `grad`, the gradient of the mask of a block, to its place in `mask_grad`, that of the full
        mask.
        """
