"""Attention on one device that also returns the log-sum-exp, with a backward that takes one; as a ring needs
it.

    out = softmax(scale Q K^T + mask) V          lse = log sum exp(scale Q K^T + mask), over the keys

The softmax over all keys follows from those over blocks of them: lse gives the weight of each block.

    lse = log(exp(lse_1) + exp(lse_2))           out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

The gradient through all keys is a sum over blocks if each takes the lse and the output of all of them: P =
exp(S - lse) are the weights that its keys have among all, and sum_j P_j dP_j, the gradient of out times out,
is that of all blocks.

    Q       [B, H, n, d]     K  [B, G, m, d]     V  [B, G, m, e]     out  [B, H, n, e]
    lse     [B, H, n], float32 or float64
    mask    [B or 1, H or 1, n or 1, m], bool (true: attended) or float (added)

H is a multiple of G: heads h R .. h R + R - 1 of queries share head h of keys and values. A row that attends
to nothing has out 0 and lse -inf.

    where       kernel                          keys and values of G heads     widths d, e
    CPU         flash attention of torch        unchanged                      padded with zeros to the same
    CUDA, half  cuDNN or flash, no mask         unchanged                      padded, a multiple of 8
    CUDA        memory-efficient attention      repeated to H heads            padded to a multiple of 8
    else        matmuls and a softmax: any dtype, dropout, and masks that need a gradient

cuDNN's kernel is taken from Hopper on, where torch can use it; `torch.backends.cuda.enable_cudnn_sdp(False)`
leaves these calls to flash attention.

Matmuls and a softmax: P = exp(scale Q K^T + mask - lse), out = (P keep / (1 - p)) V, with at most MAX_SCORES
scores in memory. No other kernel holds scores in memory.
Paper: Dao et al. 2022, "FlashAttention", arXiv 2205.14135 (section 3.1, the merging of blocks); Rabe and
Staats 2021, "Self-attention does not need O(n^2) memory", arXiv 2112.05682 (chunks).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from meshwright.device.local_device import fused_attention_capability, takes_cudnn_attention

MAX_SCORES = 1 << 22  # scores that are in memory at once
MAX_CUDNN_WIDTH = 128  # of heads, in the backward of cuDNN
NEG_INF = float("-inf")


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights with probability `p`; `keep`, bool [B, H, n, m], marks those that stay."""

    keep: torch.Tensor
    p: float


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of lse and of sums over blocks: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def math_attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    causal: bool,
    scale: float,
    dropout: AttentionDropout | None = None,
    row_offset: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `attention` by matmuls and a softmax."""
    outs, sums, wide = [], [], accumulation_dtype(query.dtype)
    key, value = key.to(wide), value.to(wide)
    for rows in _query_chunks(query, key):
        scores = _scores(query[:, :, rows].to(wide), key, mask, causal, scale, rows, row_offset)
        lse = scores.logsumexp(-1)
        weights = _apply_dropout(
            scores.sub_(lse.masked_fill(lse == NEG_INF, 0.0).unsqueeze(-1)).exp_(), dropout, rows
        )
        outs.append(_ungroup_heads(_group_heads(weights, key) @ value, query))
        sums.append(lse)
    return torch.cat(outs, 2).to(query.dtype), torch.cat(sums, 2)


def math_attention_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    mask: Any,
    causal: bool,
    scale: float,
    mask_grad: Any,
    dropout: AttentionDropout | None = None,
    row_offset: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `attention_backward` by matmuls and a softmax."""
    wide, of_query = accumulation_dtype(query.dtype), []
    keys, values = key.to(wide), value.to(wide)
    of_key, of_value = torch.zeros_like(keys), torch.zeros_like(values)
    for rows in _query_chunks(query, key):
        q, g, o = (each[:, :, rows].to(wide) for each in (query, grad, out))
        weights = (
            _scores(q, keys, mask, causal, scale, rows, row_offset).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        )
        q, g, shared = (
            _group_heads(q, keys),
            _group_heads(g, keys),
            _group_heads(_apply_dropout(weights, dropout, rows), keys),
        )
        of_value += shared.transpose(-1, -2) @ g
        of_scores = _apply_dropout(_ungroup_heads(g @ values.transpose(-1, -2), query), dropout, rows)
        of_scores = of_scores - (o * _ungroup_heads(g, query)).sum(-1, keepdim=True)
        of_scores *= weights
        if mask_grad is not None:
            into = _mask_rows(mask_grad, rows)
            into += of_scores.sum_to_size(into.shape).to(into.dtype)
        of_scores = _group_heads(of_scores.mul_(scale), keys)
        of_query.append(_ungroup_heads(of_scores @ keys, query))
        of_key += of_scores.transpose(-1, -2) @ q
    return torch.cat(of_query, 2).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _query_chunks(query: torch.Tensor, key: torch.Tensor) -> Iterator[slice]:
    rows, each = query.shape[2], query.shape[0] * query.shape[1] * key.shape[2]
    step = max(1, MAX_SCORES // max(1, each))
    yield from (slice(first, min(rows, first + step)) for first in range(0, rows, step))


def _scores(
    query: Any, key: Any, mask: Any, causal: bool, scale: float, rows: slice, above: Any
) -> torch.Tensor:
    scores = _ungroup_heads(_group_heads(query, key) @ key.transpose(-1, -2), query).mul_(scale)
    if causal:
        places = torch.arange(key.shape[-2], device=key.device)
        return scores.masked_fill_(places > places[rows].unsqueeze(-1), NEG_INF)
    if mask is None:
        return scores
    mine = _mask_rows(mask, rows)
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mine, NEG_INF)
    scores.add_(
        mine.detach().to(scores.dtype)
    )  # rounded here, as on one device, before what stands above is taken off
    return scores if above is None else scores.sub_(_mask_rows(above, rows).to(scores.dtype))


def _mask_rows(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    return mask[:, :, rows] if mask.shape[2] > 1 else mask


def _apply_dropout(weights: torch.Tensor, thin: AttentionDropout | None, rows: slice) -> torch.Tensor:
    if thin is None:
        return weights
    return weights.masked_fill(~thin.keep[:, :, rows], 0.0) * (1 / (1 - thin.p) if thin.p < 1 else 0.0)


def _group_heads(tensor: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _ungroup_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    heads = query.shape[1]
    return tensor.unflatten(2, (heads // tensor.shape[1], -1)).flatten(1, 2)


HALF_DTYPES = (torch.float16, torch.bfloat16)
aten: Any = torch.ops.aten


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float,
    dropout: AttentionDropout | None = None,
    row_offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of `query` to these keys and values, [B, H, n, e], and its lse, [B, H, n]; shapes
    as in the module.

    Not recorded by autograd.

    Args:
        causal: query i attends to the keys up to i; there are as many of both, and no mask.
        row_offset: subtracted from the scores of rows whose mask is far from 0 everywhere, [B or 1, H or 1, n
            or 1, 1]; lse is relative to it.
    """
    if not query.numel() or not key.shape[-2]:
        return _empty_output(query, value)
    match "plain" if dropout is not None or row_offset is not None else _choose_kernel(query, value, mask):
        case "cpu":
            out, lse = _cpu(query, key, value, mask, causal, scale)
        case "cudnn":
            out, lse = _cudnn(query, key, value, causal, scale)
        case "flash":
            out, lse = _flash(query, key, value, causal, scale)
        case "efficient":
            out, lse = _efficient(query, key, value, mask, causal, scale)
        case _:
            return math_attention(query, key, value, mask, causal, scale, dropout, row_offset)
    return (out, lse) if mask is None else _fix_masked_rows(out, lse, mask)


def attention_backward(
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
    mask_grad: torch.Tensor | None = None,
    dropout: AttentionDropout | None = None,
    row_offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the contributions of these keys and values to the gradients of query, key and value, of their
    shapes.

    Args:
        grad: the gradient of `out`.
        out, lse: of the attention to all keys, of which these are some.
        mask_grad: the gradient of the mask is added to it if given; of the shape of the mask.
    """
    if not query.numel() or not key.shape[-2]:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    lse = lse.masked_fill(lse == NEG_INF, 0.0)  # exp(-inf - 0): who looks at nothing weighs nothing
    given = grad, query, key, value, out, lse
    match (
        "plain"
        if any(each is not None for each in (mask_grad, dropout, row_offset))
        else _choose_kernel(query, value, mask)
    ):
        case "cpu":
            return _cpu_backward(*given, mask, causal, scale)
        case "cudnn":
            return _cudnn_backward(*given, causal, scale)
        case "flash":
            return _flash_backward(*given, causal, scale)
        case "efficient":
            return _efficient_backward(*given, mask, causal, scale)
        case _:
            return math_attention_backward(*given, mask, causal, scale, mask_grad, dropout, row_offset)


def _choose_kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str:
    kind, dtype = query.device.type, query.dtype
    if kind == "cpu" and dtype.is_floating_point and dtype.itemsize > 1:
        return "cpu"
    capability = fused_attention_capability(query.device)
    if capability is None:
        return ""
    wide = max(query.shape[-1], value.shape[-1]) > 256
    newer = capability >= (8, 0)
    if dtype in HALF_DTYPES and mask is None and newer and not wide:
        return "cudnn" if _can_use_cudnn(query, value) else "flash"
    return (
        "efficient"
        if dtype in (*HALF_DTYPES[:1], torch.float32) or (dtype == torch.bfloat16 and newer)
        else ""
    )


def _can_use_cudnn(query: torch.Tensor, value: torch.Tensor) -> bool:
    width = _multiple_of_8(query.shape[-1], value.shape[-1])
    if (fused_attention_capability(query.device) or (0, 0)) < (9, 0) or width > MAX_CUDNN_WIDTH:
        return False
    query, value = (_pad_width(each, width) for each in (query, value))
    # keys have the shape of the values by now
    return takes_cudnn_attention(query, value, value)


def _empty_output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query.shape[:-1]
    return query.new_zeros((*shape, value.shape[-1])), query.new_full(
        shape, NEG_INF, dtype=accumulation_dtype(query.dtype)
    )


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.detach().to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask.logical_not(), NEG_INF)


def _fix_masked_rows(
    out: torch.Tensor, lse: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    seen = (mask if mask.dtype == torch.bool else mask > NEG_INF).any(-1)
    return out.masked_fill(~seen.unsqueeze(-1), 0.0), lse.masked_fill(~seen, NEG_INF)


def _pad_width(tensor: torch.Tensor, width: int) -> torch.Tensor:
    if tensor.shape[-1] != width:
        return F.pad(tensor, (0, width - tensor.shape[-1]))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(query.shape[-1], value.shape[-1])
    given = [_pad_width(each, width) for each in (query, key, value)]
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(*given, 0.0, causal, attn_mask=_additive_mask(mask, query.dtype), scale=scale)
    return out[..., : value.shape[-1]], lse


def _cpu_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow = query.shape[-1], value.shape[-1]
    grad, query, key, value, out = (
        _pad_width(each, max(wide, narrow)) for each in (grad, query, key, value, out)
    )
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = op(
        grad,
        query,
        key,
        value,
        out,
        lse,
        0.0,
        causal,
        attn_mask=_additive_mask(mask, query.dtype),
        scale=scale,
    )
    return found[0][..., :wide], found[1][..., :wide], found[2][..., :narrow]


def _multiple_of_8(*widths: int) -> int:
    return -(-max(widths) // 8) * 8


def _cudnn(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    width = _multiple_of_8(query.shape[-1], value.shape[-1])
    given = [_pad_width(each, width) for each in (query, key, value)]
    found = aten._scaled_dot_product_cudnn_attention(*given, None, True, 0.0, causal, scale=scale)
    return found[0][..., : value.shape[-1]], found[1].squeeze(-1)


def _cudnn_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow = query.shape[-1], value.shape[-1]
    given = [_pad_width(each, _multiple_of_8(wide, narrow)) for each in (grad, query, key, value, out)]
    draws = torch.zeros((), dtype=torch.int64, device=query.device)
    lse, longest = lse.contiguous().unsqueeze(-1), (query.shape[-2], key.shape[-2])
    rest = (lse, draws, draws, None, None, None, *longest, 0.0, causal)
    found = aten._scaled_dot_product_cudnn_attention_backward(*given, *rest, scale=scale)
    return found[0][..., :wide], found[1][..., :wide], found[2][..., :narrow]


def _flash(query: Any, key: Any, value: Any, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    width = _multiple_of_8(query.shape[-1], value.shape[-1])
    given = [_pad_width(each, width) for each in (query, key, value)]
    found = aten._scaled_dot_product_flash_attention(*given, 0.0, causal, False, scale=scale)
    return found[0][..., : value.shape[-1]], found[1]


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow = query.shape[-1], value.shape[-1]
    grad, query, key, value, out = (
        _pad_width(each, _multiple_of_8(wide, narrow)) for each in (grad, query, key, value, out)
    )
    draws = torch.zeros(2, dtype=torch.uint64, device=query.device)  # where dropout would start from
    op, longest = aten._scaled_dot_product_flash_attention_backward, (query.shape[-2], key.shape[-2])
    found = op(
        grad, query, key, value, out, lse, None, None, *longest, 0.0, causal, draws, draws[:0], scale=scale
    )
    return found[0][..., :wide], found[1][..., :wide], found[2][..., :narrow]


def _efficient(
    query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, narrow, heads = _multiple_of_8(query.shape[-1]), _multiple_of_8(value.shape[-1]), query.shape[1]
    given = (
        _pad_width(query, wide),
        _repeat_kv(_pad_width(key, wide), heads),
        _repeat_kv(_pad_width(value, narrow), heads),
    )
    op = aten._scaled_dot_product_efficient_attention
    out, lse, *_ = op(*given, _aligned_bias(mask, query, key), True, 0.0, causal, scale=scale)
    return out[..., : value.shape[-1]], lse[..., : query.shape[-2]]


def _efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, narrow, heads, groups = query.shape[-1], value.shape[-1], query.shape[1], key.shape[1]
    bias = _aligned_bias(mask, query, key)
    query, key, value = (
        _pad_width(query, _multiple_of_8(wide)),
        _pad_width(key, _multiple_of_8(wide)),
        _pad_width(value, _multiple_of_8(narrow)),
    )
    # in half precision the kernel itself sums out * grad, of out as it gives it: [B, n, H, e] in memory
    grad, out = (
        _pad_width(each, value.shape[-1]).transpose(1, 2).contiguous().transpose(1, 2) for each in (grad, out)
    )
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    draws = torch.zeros((), dtype=torch.int64, device=query.device)
    given = grad, query, _repeat_kv(key, heads), _repeat_kv(value, heads), bias, out, lse, draws, draws, 0.0
    op = aten._scaled_dot_product_efficient_attention_backward
    found = op(*given, (True, True, True, False), causal, scale=scale)
    of_key, of_value = (each.unflatten(1, (groups, -1)).sum(2) for each in found[1:3])
    return found[0][..., :wide], of_key[..., :wide], of_value[..., :narrow]


def _repeat_kv(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    groups = tensor.shape[1]
    return tensor if groups == heads else tensor.repeat_interleave(heads // groups, 1)


def _aligned_bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    bias = _additive_mask(mask, query.dtype)
    if bias is None:
        return None
    keys = key.shape[-2]
    padded = F.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % 16))
    return padded[..., :keys].expand(*query.shape[:3], keys)
