"""The words of a ring: who is in it, what it sends, and what is computed of a rank's queries and keys that come by."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from meshwright.core.tokens import Span, count_of

Kind = Literal["none", "all", "causal", "some"]


class Coming(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when what comes is there, and what goes has gone."""


Shift = Callable[
    [torch.Tensor, torch.Tensor], Coming
]  # fills the first with what the rank before sends, of the second to the next


@dataclass(frozen=True)
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

    @property
    def most(self) -> int:
        """The keys of the rank that has most."""
        return max(count_of(spans) for spans in self.keys)


@dataclass(frozen=True)
class Pair:
    """Rows of this rank's queries and keys of one block, as they lie there, and at which positions the sample has them."""

    rows: Span
    keys: Span
    kind: Kind
    queries_at: tuple[Span, ...]
    keys_at: tuple[Span, ...]
