"""Attention on one device, with what a ring needs besides: the log of the sum that it divides by, and a backward that takes one.

    out = softmax(scale Q K^T + mask) V          lse = log sum exp(scale Q K^T + mask), over the keys

The softmax over all keys follows from those over blocks of them: with lse one knows how much each block weighs.

    lse = log(exp(lse_1) + exp(lse_2))           out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

And the gradient through all keys is a sum over blocks, if each takes the lse and the output of all of them: P = exp(S - lse)
are the weights that its keys have among all, and sum_j P_j dP_j, the gradient of out times out, is that of all blocks.

    Q       [B, H, n, d]     K  [B, G, m, d]     V  [B, G, m, e]     out  [B, H, n, e]     lse  [B, H, n], float32 or float64
    mask    [B or 1, H or 1, n or 1, m], bool (true: is looked at) or float (is added)

H is a multiple of G: heads h R .. h R + R - 1 of queries share head h of keys and values. Of a row that may look at nothing, out
is 0 and lse -inf.

    where       kernel                          keys and values of G heads     widths d, e
    CPU         flash attention of torch        as they are                    padded with zeros to the same
    CUDA, half  flash attention, no mask        as they are                    padded to the same, a multiple of 8
    CUDA        memory-efficient attention      copied to H heads              padded to a multiple of 8
    else        products and a softmax (plain.py): any dtype, dropout, and masks that ask for a gradient

Only the last one has scores in memory. Paper: Dao et al. 2022, "FlashAttention", arXiv 2205.14135 (section 3.1, the merging of
blocks); Rabe and Staats 2021, "Self-attention does not need O(n^2) memory", arXiv 2112.05682 (chunks).

Attention by products and a softmax, where no kernel can do it: any dtype, dropout of weights, and gradients of masks.

    P = exp(scale Q K^T + mask - lse)        out = (P keep / (1 - p)) V        sum_j P_j dP_j = out times its gradient

CHUNK scores are in memory at once. Shapes are those of kernel.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

CHUNK = 1 << 22  # scores that are in memory at once
NEVER = float("-inf")


@dataclass(frozen=True)
class Thin:
    """Dropout with probability `p` of the weights, of which those in `keep` stay: bool, [B, H, n, m]."""

    keep: torch.Tensor
    p: float


def sums_in(dtype: torch.dtype) -> torch.dtype:
    """In what lse, and sums over blocks, are kept: float32, or float64 for that."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def plain(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float, thin: Thin | None = None, above: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kernel.attend` says."""
    outs, sums, wide = [], [], sums_in(query.dtype)
    key, value = key.to(wide), value.to(wide)
    for rows in _chunks(query, key):
        scores = _scores(query[:, :, rows].to(wide), key, mask, causal, scale, rows, above)
        lse = scores.logsumexp(-1)
        weights = _thinned(scores.sub_(lse.masked_fill(lse == NEVER, 0.0).unsqueeze(-1)).exp_(), thin, rows)
        outs.append(_by_group(_shared(weights, key) @ value, query))
        sums.append(lse)
    return torch.cat(outs, 2).to(query.dtype), torch.cat(sums, 2)


def plain_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    mask: Any,
    causal: bool,
    scale: float,
    of_mask: Any,
    thin: Thin | None = None,
    above: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `kernel.attend_backward` says."""
    wide, of_query = sums_in(query.dtype), []
    keys, values = key.to(wide), value.to(wide)
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _chunks(query, key):
        q, g, o = (each[:, :, rows].to(wide) for each in (query, grad, out))
        weights = _scores(q, keys, mask, causal, scale, rows, above).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        q, g, shared = _shared(q, keys), _shared(g, keys), _shared(_thinned(weights, thin, rows), keys)
        of_value += shared.transpose(-1, -2) @ g
        of_scores = _thinned(_by_group(g @ values.transpose(-1, -2), query), thin, rows)
        of_scores = of_scores - (o * _by_group(g, query)).sum(-1, keepdim=True)
        of_scores *= weights
        if of_mask is not None:
            into = _of(of_mask, rows)
            into += of_scores.sum_to_size(into.shape).to(into.dtype)
        of_scores = _shared(of_scores.mul_(scale), keys)
        of_query.append(_by_group(of_scores @ keys, query))
        of_key += of_scores.transpose(-1, -2) @ q
    return torch.cat(of_query, 2).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _chunks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    """Rows of queries whose scores fit into CHUNK; one at least."""
    rows, each = query.shape[2], query.shape[0] * query.shape[1] * key.shape[2]
    step = max(1, CHUNK // max(1, each))
    yield from (slice(first, min(rows, first + step)) for first in range(0, rows, step))


def _scores(query: Any, key: Any, mask: Any, causal: bool, scale: float, rows: slice, above: Any) -> torch.Tensor:
    scores = _by_group(_shared(query, key) @ key.transpose(-1, -2), query).mul_(scale)
    if causal:
        places = torch.arange(key.shape[-2], device=key.device)
        return scores.masked_fill_(places > places[rows].unsqueeze(-1), NEVER)
    if mask is None:
        return scores
    mine = _of(mask, rows)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mine, NEVER)
    scores.add_(mine.detach().to(scores.dtype))  # rounded here, as on one device, before what stands above is taken off
    return scores if above is None else scores.sub_(_of(above, rows).to(scores.dtype))


def _of(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _thinned(weights: torch.Tensor, thin: Thin | None, rows: slice) -> torch.Tensor:
    """What dropout leaves of weights, or of their gradients."""
    if thin is None:
        return weights
    return weights.masked_fill(~thin.keep[:, :, rows], 0.0) * (1 / (1 - thin.p) if thin.p < 1 else 0.0)


def _shared(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Rows by the head of keys that they share, [B, G, heads per group x rows, ..], of a tensor by head."""
    return tensor.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _by_group(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The other way round: [B, H, rows, ..]."""
    heads = query.shape[1]
    return tensor.unflatten(2, (heads // tensor.shape[1], -1)).flatten(1, 2)


NARROW = (torch.float16, torch.bfloat16)
aten: Any = torch.ops.aten


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float,
    thin: Thin | None = None,
    above: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of `query` to these keys and values, [B, H, n, e], and its lse, [B, H, n]; see the module for shapes.

    `causal`: query i looks at the keys up to i, and there are as many of both; then there is no mask. Of a row whose mask is
    far from 0 everywhere, lse is counted from `above`, [B or 1, H or 1, n or 1, 1], where that is given. Autograd sees nothing.
    """
    if not query.numel() or not key.shape[-2]:
        return _nothing(query, value)
    match "plain" if thin is not None or above is not None else _kernel(query, value, mask):
        case "cpu":
            out, lse = _cpu(query, key, value, mask, causal, scale)
        case "flash":
            out, lse = _flash(query, key, value, causal, scale)
        case "efficient":
            out, lse = _efficient(query, key, value, mask, causal, scale)
        case _:
            return plain(query, key, value, mask, causal, scale, thin, above)
    return (out, lse) if mask is None else _without_blind(out, lse, mask)


def attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float,
    of_mask: torch.Tensor | None = None,
    thin: Thin | None = None,
    above: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What these keys and values add to the gradients of query, key and value, of their shapes.

    `out` and `lse` are those of the attention to all keys, of which these are some, and `grad` is the gradient of that `out`. The
    gradient of the mask is added to `of_mask`, which has its shape, where that is given.
    """
    if not query.numel() or not key.shape[-2]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    lse = lse.masked_fill(lse == NEVER, 0.0)  # exp(-inf - 0): who looks at nothing weighs nothing
    given = grad, query, key, value, out, lse
    match "plain" if any(each is not None for each in (of_mask, thin, above)) else _kernel(query, value, mask):
        case "cpu":
            return _cpu_backward(*given, mask, causal, scale)
        case "flash":
            return _flash_backward(*given, causal, scale)
        case "efficient":
            return _efficient_backward(*given, mask, causal, scale)
        case _:
            return plain_backward(*given, mask, causal, scale, of_mask, thin, above)


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention to the keys of both, from those to some (`out`, `lse`) and to others; in the dtype of `out`."""
    part = torch.sigmoid(more_lse - lse).masked_fill_(more_lse == NEVER, 0.0)  # of nothing and nothing: nothing
    return torch.lerp(out, more.to(out.dtype), part.to(out.dtype).unsqueeze(-1)), torch.logaddexp(lse, more_lse)


def _kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Which kernel can do it; "" where none can."""
    kind, dtype = query.device.type, query.dtype
    if kind == "cpu" and dtype.is_floating_point and dtype.itemsize > 1:
        return "cpu"
    if kind != "cuda" or torch.version.cuda is None:
        return ""
    wide = max(query.shape[-1], value.shape[-1]) > 256
    newer = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if dtype in NARROW and mask is None and newer and not wide:
        return "flash"
    return "efficient" if dtype in (*NARROW[:1], torch.float32) or (dtype == torch.bfloat16 and newer) else ""


def _nothing(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:-1]
    return query.new_zeros((*shape, value.shape[-1])), query.new_full(shape, NEVER, dtype=sums_in(query.dtype))


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """`mask` as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.detach().to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), NEVER)


def _without_blind(out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel says of rows that may look at nothing, put right."""
    seen = (mask if mask.dtype == torch.bool else mask > NEVER).any(-1)
    return out.masked_fill(~seen.unsqueeze(-1), 0.0), lse.masked_fill(~seen, NEVER)


def _wide(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """`tensor` with zeros up to `width`, and no stride within a row."""
    if tensor.shape[-1] != width:
        return F.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(query.shape[-1], value.shape[-1])
    given = [_wide(each, width) for each in (query, key, value)]
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*given, 0.0, causal, attn_mask=_added(mask, query.dtype), scale=scale)
    return out[..., : value.shape[-1]], lse


def _cpu_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow = query.shape[-1], value.shape[-1]
    grad, query, key, value, out = (_wide(each, max(wide, narrow)) for each in (grad, query, key, value, out))
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = op(grad, query, key, value, out, lse, 0.0, causal, attn_mask=_added(mask, query.dtype), scale=scale)
    return found[0][..., :wide], found[1][..., :wide], found[2][..., :narrow]


def _eighths(*widths: int) -> int:
    return -(-max(widths) // 8) * 8


def _flash(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    width = _eighths(query.shape[-1], value.shape[-1])
    given = [_wide(each, width) for each in (query, key, value)]
    found = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)
    return found[0][..., : value.shape[-1]], found[1]


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow = query.shape[-1], value.shape[-1]
    grad, query, key, value, out = (_wide(each, _eighths(wide, narrow)) for each in (grad, query, key, value, out))
    draws = torch.zeros(2, dtype=torch.uint64, device=query.device)  # where dropout would start from
    op, longest = aten._scaled_dot_product_flash_attention_backward, (query.shape[-2], key.shape[-2])
    found = op(grad, query, key, value, out, lse, None, None, *longest, 0.0, causal, draws, draws[:0], scale=scale)
    return found[0][..., :wide], found[1][..., :wide], found[2][..., :narrow]


def _efficient(query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide, narrow, heads = _eighths(query.shape[-1]), _eighths(value.shape[-1]), query.shape[1]
    given = _wide(query, wide), _for_heads(_wide(key, wide), heads), _for_heads(_wide(value, narrow), heads)
    op = aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(*given, _aligned(mask, query, key), True, 0.0, causal, scale=scale)
    return out[..., : value.shape[-1]], lse[..., : query.shape[-2]]


def _efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow, heads, groups = query.shape[-1], value.shape[-1], query.shape[1], key.shape[1]
    bias = _aligned(mask, query, key)
    query, key, value = _wide(query, _eighths(wide)), _wide(key, _eighths(wide)), _wide(value, _eighths(narrow))
    grad, out = (_wide(each, value.shape[-1]).contiguous() for each in (grad, out))
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    draws = torch.zeros((), dtype=torch.int64, device=query.device)
    given = grad, query, _for_heads(key, heads), _for_heads(value, heads), bias, out, lse, draws, draws, 0.0
    op = aten._scaled_dot_product_efficient_attention_backward
    found = op(*given, (True, True, True, False), causal, scale=scale)
    of_key, of_value = (each.unflatten(1, (groups, -1)).sum(2) for each in found[1:3])
    return found[0][..., :wide], of_key[..., :wide], of_value[..., :narrow]


def _for_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, 1)


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as the kernel wants it: rows that begin at multiples of 16 elements."""
    bias = _added(mask, query.dtype)
    if bias is None:
        return None
    keys = key.shape[-2]
    padded = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))
    return padded[..., :keys].expand(*query.shape[:3], keys)
