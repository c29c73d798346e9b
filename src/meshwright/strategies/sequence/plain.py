"""Attention by products and a softmax, where no kernel can do it: any dtype, dropout of weights, and gradients of masks.

    P = exp(scale Q K^T + mask - lse)        out = (P keep / (1 - p)) V        sum_j P_j dP_j = out times its gradient

CHUNK scores are in memory at once. Shapes are those of kernel.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

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
