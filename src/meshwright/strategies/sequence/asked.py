"""One call of attention as techniques answer it: in four dims, in the dtype of products, refused where it is not about tokens."""

from dataclasses import dataclass

import torch

from meshwright.core.errors import PlanError
from meshwright.core.tokens import Span
from meshwright.model.attend import Asked
from meshwright.model.dropout import kept as thinned
from meshwright.model.sliced import Part


@dataclass(frozen=True)
class Fitted:
    """What is asked: query [B, H, n, d], key [B, G, m, d], value [B, G, m, e], and a mask or None.

    The mask is [B or 1, H or 1, n or 1, all keys]; `shape` is that of what comes out, in the dims of what was asked. Weights are
    dropped with probability `drop`. `together` and `bias` are those of `Asked`, in the dims of the mask.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    shape: tuple[int, ...]
    drop: float = 0.0
    together: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def back(self, out: torch.Tensor) -> torch.Tensor:
        """`out`, [B, H, n, e], in the dims of what was asked."""
        return out.reshape(self.shape)


def fitted(asked: Asked, name: str) -> Fitted:
    """`asked`, for the technique `name`.

    Raises PlanError where queries, keys or the mask are not those of this rank's tokens.
    """
    where = f"strategies.{name}"
    query, key, value = (_cast(each) for each in (asked.query, asked.key, asked.value))
    mask = None if asked.mask is None else _cast(asked.mask)
    for what, tensor, share in (("queries", query, asked.queries), ("keys", key, asked.keys), ("values", value, asked.keys)):
        if tensor.shape[-2] != share.count:
            text = f"attention takes in {tensor.shape[-2]} {what}, and this rank has {share.count} of {share.length} tokens"
            raise PlanError(text, fix="attend to the tokens of the row alone, or set mesh.cp = 1", where=where)
    if mask is not None:
        keys = asked.keys.length
        if asked.causal or mask.shape[-1] not in (keys, 1) or mask.shape[-2] not in (asked.queries.count, 1):
            text = f"the mask is of shape {list(mask.shape)}; needed are rows for {asked.queries.count} queries of this rank"
            fix = "give the block a mask of shape [rows, heads, tokens, tokens], made outside of it; and is_causal = False"
            raise PlanError(f"{text}, and columns for all {keys} keys", fix=fix, where=where)
    mask, together, bias = (_in_four(each, query, asked.keys.length) for each in (mask, asked.together, asked.bias))
    shape = (*query.shape[:-1], value.shape[-1])
    return Fitted(_flat(query), _flat(key), _flat(value), mask, shape, asked.dropout, together, bias)


def kept(asked: Asked, rows: tuple[Span, ...], heads: Span | None = None) -> torch.Tensor | None:
    """Which weights dropout leaves to queries at the positions `rows`, bool [B, H, rows, all keys]; None: there is none.

    It is what one device draws. `heads` are some of those of queries here, which come in four dims then.
    """
    if not asked.dropout:
        return None
    before = asked.query.shape[:-2]
    part = Part((*before, asked.queries.length, asked.keys.length), (*(((-3, (heads,)),) if heads else ()), (-2, rows)))
    return _flat(thinned(asked.query, part, asked.dropout))


def _in_four(mask: torch.Tensor | None, query: torch.Tensor, keys: int) -> torch.Tensor | None:
    """A mask in four dims, with columns of all keys."""
    if mask is None:
        return None
    before = mask.shape[:-2] if query.ndim <= 4 else query.shape[:-2]
    mask = mask.expand(*before, mask.shape[-2], keys)
    return mask.reshape(*[1] * (4 - mask.ndim), *mask.shape) if mask.ndim <= 4 else mask.flatten(0, -4)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """In four dims, [rows, heads, tokens, width]."""
    if tensor.ndim < 4:
        return tensor.reshape(*[1] * (4 - tensor.ndim), *tensor.shape)
    return tensor if tensor.ndim == 4 else tensor.flatten(0, -4)


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """As products take it under autocast."""
    kind = tensor.device.type
    casts = tensor.is_floating_point() and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor
