"""The geometry of a ring: the positions of every rank's queries and keys, messages in flight, and the blocks
of queries and keys that are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
import torch

from meshwright.model.tensors.select_token_ranges import PositionSelector, span_positions
from meshwright.plan.sharding.sequence_sharding import TokenRange, num_positions, select_positions

MaskKind = Literal["all", "causal", "some"]


class PendingTransfer(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Returns when the received tensor is complete and the sent one may be overwritten."""


ShiftFn = Callable[
    [torch.Tensor, torch.Tensor], PendingTransfer
]  # fills the first with what the rank before sends, of the second to the next


@dataclass(frozen=True, eq=False)
class AttentionRing:
    """The ranks of a ring, seen from the one at `index`: the positions of its own queries, and of the keys of
    every rank.

    `causal`: a query attends to keys at its position and before. Keys and values travel in `comm_dtype`;
    None: in their own. Dropout drops attention weights with probability `dropout_p`.
    """

    index: int
    query_spans: tuple[TokenRange, ...]
    key_spans: tuple[tuple[TokenRange, ...], ...]
    scale: float
    causal: bool
    shift: ShiftFn
    comm_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    _selector: PositionSelector = field(default_factory=PositionSelector, repr=False)

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        """The number of keys of each rank."""
        return tuple(map(num_positions, self.key_spans))

    @property
    def max_keys(self) -> int:
        """The number of keys of the rank with most keys."""
        return max(self.num_keys)

    @cached_property
    def key_positions(self) -> tuple[np.ndarray, ...]:
        """The positions of the keys of every rank, ascending."""
        return tuple(map(span_positions, self.key_spans))

    @cached_property
    def query_positions(self) -> np.ndarray:
        """The positions of this rank's queries, ascending."""
        return span_positions(self.query_spans)

    def select_keys(self, tensor: torch.Tensor, rank: int, keys: TokenRange) -> torch.Tensor:
        """Of `tensor`, [.., all keys], returns the columns of the local keys `keys` of `rank`."""
        return self._selector.select_spans(tensor, -1, select_positions(self.key_spans[rank], *keys))

    def add_to_keys(self, tensor: torch.Tensor, rank: int, keys: TokenRange, added: torch.Tensor) -> None:
        """Adds `added` to these columns of `tensor`, in place."""
        self._selector.add_to_spans(tensor, -1, select_positions(self.key_spans[rank], *keys), added)


@dataclass(frozen=True)
class QueryKeyBlock:
    """A range of this rank's queries and of one rank's keys, both local, of some samples (None: of all).

    Its `kind` selects the mask: none ("all"), the kernel's own ("causal": query i attends to keys up to i),
    or a mask tensor ("some").
    """

    queries: TokenRange
    keys: TokenRange
    kind: MaskKind
    samples: TokenRange | None = None

    @property
    def query_index(self) -> tuple[slice, slice, slice]:
        """The index of the queries in [samples, heads, queries, ..]."""
        return self._sample_index, slice(None), slice(*self.queries)

    @property
    def key_index(self) -> tuple[slice, slice, slice]:
        """The index of the keys in [samples, heads, keys, ..]."""
        return self._sample_index, slice(None), slice(*self.keys)

    @property
    def _sample_index(self) -> slice:
        return slice(None) if self.samples is None else slice(*self.samples)


class BlockMask(Protocol):
    """The keys that this rank's queries attend to, as blocks."""

    def blocks(self, rank: int) -> Sequence[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of `rank` that are computed."""

    def dense_mask(
        self, rank: int, block: QueryKeyBlock, full_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """Returns the mask of a block, [samples or 1, heads or 1, queries or 1, keys], cut from `full_mask`;
        None if it needs none.
        """

    def row_offset(self, queries: TokenRange) -> torch.Tensor | None:
        """Returns the offset of the scores of these queries, [samples or 1, heads or 1, queries or 1, 1];
        None: 0 everywhere.
        """

    def add_mask_grad(
        self, rank: int, block: QueryKeyBlock, grad: torch.Tensor, mask_grad: torch.Tensor
    ) -> None:
        """Adds `grad`, the gradient of the mask of a block, to its place in `mask_grad`, that of the full
        mask.
        """
