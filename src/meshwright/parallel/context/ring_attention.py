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

With codes (activation_compression.py) the owning rank codes its keys and values once, the others pass the
codes on, and all ranks, the owning one too, compute with what they say. A sum that is sent on would be coded
at each hop; so each rank codes its summand of a gradient and sends it to the owning rank itself, s ranks back
in step s, which adds up what all summands say, in float32 at least, in the order in which they arrive:

    rank 1 of 4           step 0            step 1            step 2            step 3
    backward  sent                          code(dk0) to 0    code(dk3) to 3    code(dk2) to 2
              received                      from 2            from 3            from 0

Fully masked parts are not computed: of this rank's queries and the keys of a block, pairs of stretches go
through a kernel, with a mask if they need one (block_mask.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
from meshwright.parallel.context.ring_geometry import (
    AttentionRing,
    BlockMask,
    PendingTransfer,
    QueryKeyBlock,
    RingCodes,
    numel_per_token,
)


def ring_attention(
    ring: AttentionRing,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None = None,
    block_mask: BlockMask | None = None,
    codes: RingCodes | None = None,
) -> Any:
    """Returns the attention of this rank's queries, [B, H, n, d], to the keys and values of all ranks: [B, H,
    n, e]; differentiable.

    All ranks of the ring call it.

    Args:
        key, value: [B, G, m, d] and [B, G, m, e], H a multiple of G.
        mask: [B or 1, H or 1, n or 1, all keys in order of positions], bool, or float to add.
        keep: the weights that dropout keeps, bool [B, H, n, all keys].
        block_mask: the mask as blocks, if known.
        codes: how keys, values and their gradients travel; None: as they are.
    """
    block_mask = block_mask or MaskCache().block_mask(ring, mask, query.device)
    return _RingAttentionFunction.apply(
        *(query, key, value, None if isinstance(block_mask, IntervalMask) else mask, keep),
        *(ring, block_mask, codes if len(ring.key_spans) > 1 else None),
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
        codes: RingCodes | None,
    ) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            blocks = _blocks(circle, key, value, codes)
            out, lse = _forward(circle, query, blocks, value.shape[-1], (mask, keep), view)
        out, above = out.to(query.dtype), view.row_offset((0, query.shape[2]))
        ctx.ring, ctx.view, ctx.codes = circle, view, codes
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
            found = _backward(
                ctx.ring, grads[0], ctx.saved_tensors, ctx.view, of_mask, ctx.codes, rounds=ctx.rounds
            )
        return *found, of_mask, None, None, None, None


def _forward(
    ring: AttentionRing,
    query: Any,
    blocks: Iterator[tuple[int, torch.Tensor, torch.Tensor]],
    width: int,
    masks: tuple[Any, Any],
    view: BlockMask,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, (whole, keep) = accumulation_dtype(query.dtype), masks
    out = query.new_zeros((*query.shape[:-1], width), dtype=wide)
    lse = query.new_full(query.shape[:-1], NEG_INF, dtype=wide)
    for rank, keys, values in blocks:
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
    ring: AttentionRing,
    grad: Any,
    saved: Sequence[Any],
    view: BlockMask,
    of_mask: Any,
    codes: RingCodes | None = None,
    *,
    rounds: bool,
) -> tuple[torch.Tensor, ...]:
    query, key, value, mask, keep, out, lse = saved
    wide, length = accumulation_dtype(query.dtype), ring.max_keys * numel_per_token(key, value)
    of_query, of_own = torch.zeros_like(query, dtype=wide), query.new_zeros(length, dtype=wide)

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
    of_keys, of_values = _split_message(of_own, key, value, key.shape[2])
    summands: _SummandsOnTheWay | _SummandsAsCodes = _SummandsOnTheWay(ring, of_own)
    if codes is not None and codes.are_sent_for(ring, of_keys, of_values):
        summands = _SummandsAsCodes(ring, codes, of_own, (of_keys, of_values))
    own_keys, own_values = key, value
    for step, (rank, keys, values) in enumerate(_blocks(ring, key, value, codes, is_noted=False)):
        if step == 0:
            own_keys, own_values = keys, values
            add(rank, own[: len(own) // 2], keys, values, of_own)
            continue
        mine = summands.zeros()
        add(rank, view.blocks(rank), keys, values, mine)
        summands.send(rank, step, mine)
    add(ring.index, late, own_keys, own_values, of_own)
    summands.finish()
    return of_query.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype)


@dataclass
class _SummandsOnTheWay:
    """Gradients of keys and values on their way to the owning rank: each rank adds its summand to the sum
    that arrives, and sends that on. `of_own` are those of this rank's keys.
    """

    ring: AttentionRing
    of_own: torch.Tensor
    _free: list[torch.Tensor] = field(default_factory=list)
    _coming: tuple[PendingTransfer, torch.Tensor, torch.Tensor] | None = None

    def zeros(self) -> torch.Tensor:
        """Returns memory for a summand, zero."""
        return self._memory().zero_()

    def send(self, rank: int, step: int, summand: torch.Tensor) -> None:
        """Starts sending the sum of `summand`, for the keys of `rank` in `step`, and what has arrived."""
        if self._coming is not None:
            coming, came, gone = self._coming
            coming.wait()
            summand += came
            self._free += [gone, came]
        came = self._memory()
        self._coming = self.ring.shift(came, summand), came, summand

    def finish(self) -> None:
        """Adds what arrives for this rank's keys."""
        if self._coming is not None:
            coming, came, _ = self._coming
            coming.wait()
            self.of_own += came

    def _memory(self) -> torch.Tensor:
        return self._free.pop() if self._free else torch.empty_like(self.of_own)


@dataclass
class _SummandsAsCodes:
    """The same as codes: each rank sends its summand to the owning rank, which adds up what codes say.

    `of_pair` are the gradients of this rank's keys and values, views of `of_own`.
    """

    ring: AttentionRing
    codes: RingCodes
    of_own: torch.Tensor
    of_pair: tuple[torch.Tensor, torch.Tensor]
    _summand: torch.Tensor | None = None
    _coming: tuple[PendingTransfer, torch.Tensor, torch.Tensor] | None = None

    def zeros(self) -> torch.Tensor:
        """Returns memory for a summand, zero."""
        self._summand = torch.empty_like(self.of_own) if self._summand is None else self._summand
        return self._summand.zero_()

    def send(self, rank: int, step: int, summand: torch.Tensor) -> None:
        """Starts sending the codes of `summand` to `rank`, whose keys this rank had in `step`."""
        pair = _split_message(summand, *self.of_pair, self.ring.num_keys[rank])
        gone = self.codes.pack(self.ring, rank, *pair, is_backward=True)
        self.finish()
        came = torch.empty_like(gone)
        self._coming = self.codes.shift_back(came, gone, step), came, gone

    def finish(self) -> None:
        """Adds what arrives for this rank's keys."""
        if self._coming is not None:
            coming, came, _ = self._coming
            coming.wait()
            found = self.codes.unpack(came, *self.of_pair, self.ring.num_keys[self.ring.index])
            for all_of, more in zip(self.of_pair, found, strict=True):
                all_of += more


def _blocks(
    ring: AttentionRing,
    key: torch.Tensor,
    value: torch.Tensor,
    codes: RingCodes | None,
    *,
    is_noted: bool = True,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields the keys and values of all ranks, this rank's first, while the next ones are received."""
    ranks, keys, values = len(ring.key_spans), key, value
    going = key.new_empty(0)
    codes = codes if codes is not None and codes.are_sent_for(ring, key, value) else None
    if codes is not None:
        going = codes.pack(ring, ring.index, key, value, is_backward=False, is_noted=is_noted)
        keys, values = codes.unpack(going, key, value, key.shape[2])
    elif ranks > 1:
        going = key.new_zeros(ring.max_keys * numel_per_token(key, value))
        for view, own in zip(_split_message(going, key, value, key.shape[2]), (key, value), strict=True):
            view.copy_(own)
    free = torch.empty_like(going)
    for step in range(ranks):
        rank, coming = (ring.index - step) % ranks, None
        if step + 1 < ranks:
            coming = ring.shift(free, going)
        yield rank, keys, values
        if coming is not None:
            coming.wait()
            going, free = free, going
            unpack = _split_message if codes is None else codes.unpack
            keys, values = unpack(going, key, value, ring.num_keys[rank - 1])


def _block_dropout(
    ring: AttentionRing, rank: int, pair: QueryKeyBlock, keep: torch.Tensor | None
) -> AttentionDropout | None:
    if keep is None:
        return None
    return AttentionDropout(ring.select_keys(keep[pair.query_index], rank, pair.keys), ring.dropout_p)


def _split_message(
    flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [(*each.shape[:2], tokens, each.shape[-1]) for each in (key, value)]
    ends = [prod(shape) for shape in shapes]
    return flat[: ends[0]].view(shapes[0]), flat[ends[0] : sum(ends)].view(shapes[1])
