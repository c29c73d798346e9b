"""Attention round a ring: keys and values of every rank pass by, and what each adds is merged or, backwards, sent home with them.

    rank 1 of 4           step 0            step 1            step 2            step 3
    forward   compute     own k1 v1         k0 v0             k3 v3             k2 v2             merged by lse (kernel.py)
              under way   k0 v0 coming      k3 v3 coming      k2 v2 coming
    backward  compute     own, a part       k0 v0             k3 v3             k2 v2             own, the rest
              under way   k0 v0             k3 v3             k2 v2 | dk0 dv0   dk3 dv3           dk1 dv1 come home

A step's transfer starts before its computation and is waited for behind it. Keys and values of one rank are one flat message, as
long as that of the rank that has most tokens: all send the same. Gradients of a block begin with the first rank behind its own,
travel on with what each adds, and arrive at home from the last one; its own share waits there.

What a mask leaves nothing of is not computed. Rows of this rank's queries and keys of a block are looked at in the chunks in
which positions were dealt: a pair of chunks is `all` (no mask), `causal` (the same chunk under a causal mask), `some` (a mask,
cut from the given one) or left out. Neighbours of one kind are one call of the kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from meshwright.core.tokens import Span, count_of
from meshwright.strategies.sequence.circle import Circle, Kind, Pair
from meshwright.strategies.sequence.kernel import attend, attend_backward, merge
from meshwright.strategies.sequence.plain import NEVER, Thin, sums_in

Kinds = Callable[[int, int, int], Kind]  # of a chunk of queries and a chunk of keys of a rank, by their numbers


def around(
    circle: Circle,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    keep: torch.Tensor | None = None,
) -> Any:
    """The attention of this rank's queries, [B, H, n, d], to the keys and values of all, [B, H, n, e]; differentiable.

    `key` is [B, G, m, d], `value` [B, G, m, e], H a multiple of G; `mask` has rows of these queries and columns of all keys in
    order of positions, [B or 1, H or 1, n or 1, all keys]: bool, or float to add. `keep`, bool [B, H, n, all keys], says which
    weights dropout leaves. All ranks of the ring call this.
    """
    return _Around.apply(query, key, value, mask, keep, circle)


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, keep: Any, circle: Circle) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            kinds = _kinds(circle, mask)
            out, lse = _forward(circle, query, key, value, (mask, keep), kinds)
        out = out.to(query.dtype)
        ctx.circle, ctx.kinds = circle, kinds
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
            found = _backward(ctx.circle, grads[0], ctx.saved_tensors, ctx.kinds, of_mask)
        return *found, of_mask, None, None


def _forward(
    circle: Circle, query: Any, key: Any, value: Any, masks: tuple[Any, Any], kinds: Kinds
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, (mask, keep) = sums_in(query.dtype), masks
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
    lse = query.new_full(query.shape[:-1], NEVER, dtype=wide)
    for rank, keys, values in _blocks(circle, key, value):
        for pair in pairs(circle, rank, kinds):
            rows, columns = slice(*pair.rows), slice(*pair.keys)
            given = query[:, :, rows], keys[:, :, columns], values[:, :, columns]
            said = {"mask": _cut(pair, mask, query), "causal": pair.kind == "causal", "scale": circle.scale}
            more = attend(*given, **said, thin=_thin(circle, pair, keep))
            out[:, :, rows], lse[:, :, rows] = merge(out[:, :, rows], lse[:, :, rows], *more)
    return out, lse


def _backward(circle: Circle, grad: Any, saved: Sequence[Any], kinds: Kinds, of_mask: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of this rank's queries, keys and values."""
    query, key, value, mask, keep, out, lse = saved
    wide, length = sums_in(query.dtype), circle.most * _per_token(key, value)
    of_query, home = torch.zeros_like(query, dtype=wide), query.new_zeros(length, dtype=wide)

    def add(some: Sequence[Pair], keys: torch.Tensor, values: torch.Tensor, message: torch.Tensor) -> None:
        of_keys, of_values = _views(message, key, value, keys.shape[2])
        for pair in some:
            rows, columns = slice(*pair.rows), slice(*pair.keys)
            given = grad[:, :, rows], query[:, :, rows], keys[:, :, columns], values[:, :, columns]
            cut = _cut(pair, mask, query)
            into = None if of_mask is None or cut is None else torch.zeros_like(cut)
            said = {"mask": cut, "causal": pair.kind == "causal", "scale": circle.scale, "of_mask": into}
            found = attend_backward(*given, out[:, :, rows], lse[:, :, rows], **said, thin=_thin(circle, pair, keep))
            for whole, more in ((of_query[:, :, rows], 0), (of_keys[:, :, columns], 1), (of_values[:, :, columns], 2)):
                whole += found[more]
            if into is not None:
                _put(pair, into, of_mask)

    own = pairs(circle, circle.index, kinds)
    late = own[len(own) // 2 :]  # while the last gradients come home: without them, nothing would be computed then
    free, gone, came, coming = list[torch.Tensor](), home, home, None
    for step, (rank, keys, values) in enumerate(_blocks(circle, key, value)):
        if step == 0:
            add(own[: len(own) // 2], keys, values, home)
            continue
        mine = (free.pop() if free else torch.empty_like(home)).zero_()
        add(pairs(circle, rank, kinds), keys, values, mine)
        if coming is not None:
            coming.wait()
            mine += came
            free += [gone, came]
        gone, came = mine, free.pop() if free else torch.empty_like(home)
        coming = circle.shift(came, gone)
    add(late, key, value, home)
    if coming is not None:
        coming.wait()
        home += came
    of_key, of_value = _views(home, key, value, key.shape[2])
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _blocks(circle: Circle, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The ranks whose keys and values come by, and those: this one's first. The next ones are under way meanwhile."""
    ranks, keys, values = len(circle.keys), key, value
    going = free = key.new_empty(0)
    if ranks > 1:
        going = key.new_zeros(circle.most * _per_token(key, value), dtype=circle.wire or key.dtype)
        free = torch.empty_like(going)
        for view, own in zip(_views(going, key, value, key.shape[2]), (key, value), strict=True):
            view.copy_(own)
    for step in range(ranks):
        rank, coming = (circle.index - step) % ranks, None
        if step + 1 < ranks:
            coming = circle.shift(free, going)
        yield rank, keys, values
        if coming is not None:
            coming.wait()
            going, free = free, going
            found = _views(going, key, value, count_of(circle.keys[rank - 1]))
            keys, values = (view.to(key.dtype) for view in found)


def pairs(circle: Circle, rank: int, kinds: Kinds) -> list[Pair]:
    """What is computed of this rank's queries and the keys of `rank`: neighbouring chunks of one kind together."""
    runs: dict[tuple[Span, Kind], list[Pair]] = {}
    for row, (rows, at) in enumerate(_chunks(circle.queries)):
        line = list[Pair]()
        for column, (keys, keys_at) in enumerate(_chunks(circle.keys[rank])):
            kind = kinds(row, rank, column)
            if kind in ("all", "some") and line and line[-1].kind == kind and line[-1].keys[1] == keys[0]:
                last = line.pop()
                line.append(Pair(rows, (last.keys[0], keys[1]), kind, (at,), (*last.keys_at, keys_at)))
            elif kind != "none":
                line.append(Pair(rows, keys, kind, (at,), (keys_at,)))
        for pair in line:
            above = runs.setdefault((pair.keys, pair.kind), [])
            if above and pair.kind != "causal" and above[-1].rows[1] == rows[0]:
                last = above.pop()
                pair = Pair((last.rows[0], rows[1]), pair.keys, pair.kind, (*last.queries_at, at), pair.keys_at)
            above.append(pair)
    return [pair for each in runs.values() for pair in each]


def _kinds(circle: Circle, mask: torch.Tensor | None) -> Kinds:
    """What is left of each pair of chunks."""
    if mask is None:
        return partial(_by_position, circle)
    if mask.requires_grad or isinstance(mask, FakeTensor):
        return lambda row, rank, column: "some"
    flags, named = list[torch.Tensor](), list[tuple[int, int, int]]()
    for row, (rows, _) in enumerate(_chunks(circle.queries)):
        mine = _rows(mask, rows)
        for rank, spans in enumerate(circle.keys):
            for column, (begin, end) in enumerate(spans):
                part = mine[..., begin:end]
                flags += [part.any(), part.all()] if mask.dtype == torch.bool else [(part > NEVER).any(), (part == 0).all()]
                named.append((row, rank, column))
    told = torch.stack(flags).view(-1, 2).tolist() if flags else []  # one wait for the device, not one per chunk
    known: dict[tuple[int, int, int], Kind] = {
        name: "all" if free else "some" if seen else "none" for name, (seen, free) in zip(named, told, strict=True)
    }
    return lambda row, rank, column: known[row, rank, column]


def _by_position(circle: Circle, row: int, rank: int, column: int) -> Kind:
    (first, end), (begin, last) = circle.queries[row], circle.keys[rank][column]
    if not circle.causal or last <= first + 1:
        return "all"
    if begin >= end:
        return "none"
    return "causal" if (first, end) == (begin, last) else "some"


def _cut(pair: Pair, mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """The mask of a pair, where it needs one."""
    if pair.kind != "some":
        return None
    if mask is None:
        rows, columns = (_positions(spans, query.device) for spans in (pair.queries_at, pair.keys_at))
        return (columns <= rows.unsqueeze(-1)).view(1, 1, len(rows), len(columns))
    return _columns(_rows(mask, pair.rows), pair)


def _thin(circle: Circle, pair: Pair, keep: torch.Tensor | None) -> Thin | None:
    """What dropout leaves of a pair."""
    return None if keep is None else Thin(_columns(keep[:, :, slice(*pair.rows)], pair), circle.drop)


def _columns(rows: torch.Tensor, pair: Pair) -> torch.Tensor:
    parts = [rows[..., begin:end] for begin, end in pair.keys_at]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _put(pair: Pair, part: torch.Tensor, whole: torch.Tensor) -> None:
    """Add `part`, for the mask of a pair, to where that was cut from the `whole` one."""
    mine, at = _rows(whole, pair.rows), 0
    for begin, end in pair.keys_at:
        mine[..., begin:end] += part[..., at : at + end - begin]
        at += end - begin


def _rows(mask: torch.Tensor, rows: Span) -> torch.Tensor:
    return mask[:, :, slice(*rows)] if mask.shape[2] > 1 else mask


def _positions(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans])


def _chunks(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    """Where the tokens of `spans` lie on their rank, one behind the other, and where in the sample."""
    at = 0
    for begin, end in spans:
        yield (at, at + end - begin), (begin, end)
        at += end - begin


def _per_token(key: torch.Tensor, value: torch.Tensor) -> int:
    """The elements of one token in a message."""
    return key.shape[0] * key.shape[1] * (key.shape[-1] + value.shape[-1])


def _views(flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of so many tokens, or their gradients, in a message."""
    shapes = [(*each.shape[:2], tokens, each.shape[-1]) for each in (key, value)]
    ends = [prod(shape) for shape in shapes]
    return flat[: ends[0]].view(shapes[0]), flat[ends[0] : sum(ends)].view(shapes[1])
