"""One call of attention as techniques answer it: in four dims, in the dtype of products, refused where it is not about tokens.

The words of a ring: who is in it, what it sends, and what is computed of a rank's queries and keys that come by.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch

from meshwright.model.rng.dropout_mode import kept as thinned
from meshwright.model.rng.sharded_draws import Part
from meshwright.model.sequence_parallel.attention_call import Asked
from meshwright.model.tensors.token_slices import positions
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.sequence_info import Span, count_of


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


Kind = Literal["all", "causal", "some"]


class Coming(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when what comes is there, and what goes has gone."""


Shift = Callable[
    [torch.Tensor, torch.Tensor], Coming
]  # fills the first with what the rank before sends, of the second to the next


@dataclass(frozen=True, eq=False)
class Circle:
    """The ranks of a ring as the one at `index` sees them: the positions of its own queries, and of the keys of every rank.

    `causal`: a query looks at keys at its position and before. Keys and values travel in `wire`; None: as they are. Dropout
    takes weights with probability `drop`.
    """

    index: int
    queries: tuple[Span, ...]
    keys: tuple[tuple[Span, ...], ...]
    scale: float
    causal: bool
    shift: Shift
    wire: torch.dtype | None = None
    drop: float = 0.0

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many keys each rank has."""
        return tuple(map(count_of, self.keys))

    @property
    def most(self) -> int:
        """The keys of the rank that has most."""
        return max(self.counts)

    @cached_property
    def places(self) -> tuple[np.ndarray, ...]:
        """The positions of the keys of every rank, one by one, rising."""
        return tuple(map(positions, self.keys))

    @cached_property
    def asked(self) -> np.ndarray:
        """Those of this rank's queries."""
        return positions(self.queries)


@dataclass(frozen=True)
class Pair:
    """Rows of this rank's queries and keys of one block, as they lie there, of some samples (None: of all).

    A kernel goes through them: with no mask where each query looks at all, with its own where it looks at keys up to its number,
    and with one that is handed to it where it looks at some.
    """

    rows: Span
    keys: Span
    kind: Kind
    samples: Span | None = None

    @property
    def mine(self) -> tuple[slice, slice, slice]:
        """Where the rows are in [samples, heads, queries, ..]."""
        return self._of, slice(None), slice(*self.rows)

    @property
    def theirs(self) -> tuple[slice, slice, slice]:
        """Where the keys are in [samples, heads, keys, ..]."""
        return self._of, slice(None), slice(*self.keys)

    @property
    def _of(self) -> slice:
        return slice(None) if self.samples is None else slice(*self.samples)


class View(Protocol):
    """What this rank's queries look at."""

    def pairs(self, rank: int) -> Sequence[Pair]:
        """What is computed of this rank's queries and the keys of `rank`."""

    def mask(self, rank: int, pair: Pair, whole: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        """The mask of a pair, [samples or 1, heads or 1, rows or 1, keys], of the `whole` one; None where it needs none."""

    def above(self, rows: Span) -> torch.Tensor | None:
        """From where scores of these queries are counted, [samples or 1, heads or 1, rows or 1, 1]; None: from 0, all of them."""

    def put(self, rank: int, pair: Pair, part: torch.Tensor, into: torch.Tensor) -> None:
        """Add `part`, a gradient of the mask of a pair, to where that comes from in `into`, that of the whole one."""
