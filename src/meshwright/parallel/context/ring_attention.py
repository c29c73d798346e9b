"""Attention around a ring: a rank receives the keys and values of every rank and merges the results;
gradients are sent back to the owning rank.

    rank 1 of 4           step 0            step 1            step 2            step 3
    forward   compute     own k1 v1         k0 v0             k3 v3             k2 v2         merged by lse
              received    k0 v0             k3 v3             k2 v2
    backward  compute     own, a part       k0 v0             k3 v3             k2 v2         own, the rest
              received    k0 v0             k3 v3             k2 v2 | dk0 dv0   dk3 dv3           dk1 dv1 own

The transfer of a step starts before its computation and is waited for behind it. Keys and values of one rank
are one flat message, as long as that of the rank with most tokens: all send the same. The gradients of a
block begin on the rank behind the owning rank; each rank adds its summand and sends the sum on. The owning
rank receives it from the last one, and adds its own summand.

Fully masked parts are not computed: of this rank's queries and the keys of a block, pairs of stretches go
through a kernel, with a mask if they need one (block_mask.py).
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.parallel.context.attention_kernel import (
    NEG_INF,
    AttentionDropout,
    accumulation_dtype,
    attention,
    attention_backward,
)
from meshwright.parallel.context.block_mask import IntervalMask, MaskCache
from meshwright.parallel.context.output_merge.merge_outputs import merge_outputs
from meshwright.parallel.context.ring_geometry import AttentionRing, BlockMask, QueryKeyBlock


def ring_attention(
    ring: AttentionRing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
) -> Any:
    """Returns the attention of this rank's queries, [B, H, n, d], to the keys and values of all ranks: [B, H,
    n, e]; differentiable.

    All ranks of the ring call it.

    Args:
        key, value: [B, G, m, d] and [B, G, m, e], H a multiple of G.
        mask: [B or 1, H or 1, n or 1, all keys in order of positions], bool, or float to add.
        keep: the weights that dropout keeps, bool [B, H, n, all keys].
        block_mask: the mask as blocks, if known.
    """
    block_mask = block_mask or MaskCache().block_mask(ring, mask, query.device)
    return _RingAttentionFunction.apply(
        query, key, value, None if isinstance(block_mask, IntervalMask) else mask, keep, ring, block_mask
    )


class _RingAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        keep: Any,
        circle: AttentionRing,
        view: BlockMask,
    ) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            out, lse = _forward(circle, query, key, value, (mask, keep), view)
        out, above = out.to(query.dtype), view.row_offset((0, query.shape[2]))
        ctx.ring, ctx.view = circle, view
        # torch's kernel keeps lse as it is, with what a mask has added to a row; its products and softmax
        # keep the weights
        ctx.rounds = keep is None and not ctx.needs_input_grad[3] and query.shape[-1] == value.shape[-1]
        lse = lse + above.squeeze(-1) if ctx.rounds and above is not None else lse
        ctx.save_for_backward(query, key, value, mask, keep, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  torch's decorator has a signature of its own
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        mask = ctx.saved_tensors[3]
        of_mask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        with torch.autocast(grads[0].device.type, enabled=False):
            found = _backward(ctx.ring, grads[0], ctx.saved_tensors, ctx.view, of_mask, rounds=ctx.rounds)
        return *found, of_mask, None, None, None


def _forward(
    ring: AttentionRing, query: Any, key: Any, value: Any, masks: tuple[Any, Any], view: BlockMask
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, (whole, keep) = accumulation_dtype(query.dtype), masks
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    lse = query.new_full(query.shape[:-1], NEG_INF, dtype=wide)
    for rank, keys, values in _blocks(ring, key, value):
        for pair in view.blocks(rank):
            mine, theirs = pair.query_index, pair.key_index
            kwargs: dict[str, Any] = {
                "mask": view.dense_mask(rank, pair, whole, query.device),
                "causal": pair.kind == "causal",
                "scale": ring.scale,
            }
            kwargs |= {
                "dropout": _block_dropout(ring, rank, pair, keep),
                "row_offset": view.row_offset(pair.queries),
            }
            more = attention(query[mine], keys[theirs], values[theirs], **kwargs)
            merge_outputs(out[mine], lse[mine], *more)
    return out, lse


def _backward(
    ring: AttentionRing, grad: Any, saved: Sequence[Any], view: BlockMask, of_mask: Any, *, rounds: bool
) -> tuple[torch.Tensor, ...]:
    query, key, value, mask, keep, out, lse = saved
    wide, length = accumulation_dtype(query.dtype), ring.max_keys * _per_token(key, value)
    of_query, param_sharding = torch.zeros_like(query, dtype=wide), query.new_zeros(length, dtype=wide)

    def add(
        rank: int,
        some: Sequence[QueryKeyBlock],
        keys: torch.Tensor,
        values: torch.Tensor,
        message: torch.Tensor,
    ) -> None:
        of_keys, of_values = _split_message(message, key, value, keys.shape[2])
        for pair in some:
            mine, theirs, cut = (
                pair.query_index,
                pair.key_index,
                view.dense_mask(rank, pair, mask, query.device),
            )
            into = None if of_mask is None or cut is None else torch.zeros_like(cut)
            given = grad[mine], query[mine], keys[theirs], values[theirs], out[mine], lse[mine]
            kwargs: dict[str, Any] = {
                "mask": cut,
                "causal": pair.kind == "causal",
                "scale": ring.scale,
                "mask_grad": into,
            }
            kwargs |= {
                "dropout": _block_dropout(ring, rank, pair, keep),
                "row_offset": None if rounds else view.row_offset(pair.queries),
            }
            found = attention_backward(*given, **kwargs)
            for all_of, more in zip((of_query[mine], of_keys[theirs], of_values[theirs]), found, strict=True):
                all_of += more
            if into is not None:
                view.add_mask_grad(rank, pair, into, of_mask)

    own = view.blocks(ring.index)
    late = own[
        len(own) // 2 :
    ]  # while the last gradients are received: without them, nothing would be computed then
    free, gone, came, coming = list[torch.Tensor](), param_sharding, param_sharding, None
    for step, (rank, keys, values) in enumerate(_blocks(ring, key, value)):
        if step == 0:
            add(rank, own[: len(own) // 2], keys, values, param_sharding)
            continue
        mine = (free.pop() if free else torch.empty_like(param_sharding)).zero_()
        add(rank, view.blocks(rank), keys, values, mine)
        if coming is not None:
            coming.wait()
            mine += came
            free += [gone, came]
        gone, came = mine, free.pop() if free else torch.empty_like(param_sharding)
        coming = ring.shift(came, gone)
    add(ring.index, late, key, value, param_sharding)
    if coming is not None:
        coming.wait()
        param_sharding += came
    of_key, of_value = _split_message(param_sharding, key, value, key.shape[2])
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _blocks(
    ring: AttentionRing, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    ranks, keys, values = len(ring.key_spans), key, value
    going = free = key.new_empty(0)
    if ranks > 1:
        going = key.new_zeros(ring.max_keys * _per_token(key, value), dtype=ring.comm_dtype or key.dtype)
        free = torch.empty_like(going)
        for view, own in zip(_split_message(going, key, value, key.shape[2]), (key, value), strict=True):
            view.copy_(own)
    for step in range(ranks):
        rank, coming = (ring.index - step) % ranks, None
        if step + 1 < ranks:
            coming = ring.shift(free, going)
        yield rank, keys, values
        if coming is not None:
            coming.wait()
            going, free = free, going
            found = _split_message(going, key, value, ring.num_keys[rank - 1])
            keys, values = (view.to(key.dtype) for view in found)


def _block_dropout(
    ring: AttentionRing, rank: int, pair: QueryKeyBlock, keep: torch.Tensor | None
) -> AttentionDropout | None:
    if keep is None:
        return None
    return AttentionDropout(ring.select_keys(keep[pair.query_index], rank, pair.keys), ring.dropout_p)


def _per_token(key: torch.Tensor, value: torch.Tensor) -> int:
    return key.shape[0] * key.shape[1] * (key.shape[-1] + value.shape[-1])


def _split_message(
    flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(*each.shape[:2], tokens, each.shape[-1]) for each in (key, value)]
    ends = [prod(shape) for shape in shapes]
    return flat[: ends[0]].view(shapes[0]), flat[ends[0] : sum(ends)].view(shapes[1])
