"""The words of a ring: who is in it, what it sends, and what is computed of a rank's queries and keys that come by."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch

from meshwright.core.tokens import Span, count_of
from meshwright.model.positions import positions

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
