"""Selects the tokens of this rank from tensors with full sequences.

A mask or positional table that glue makes for all tokens is sliced once for all layers. Ranks that exchange
heads (parallel/context/ulysses_all_to_all.py) also need the mask rows of each other's queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.model.tensors.pytree import storage_id
from meshwright.model.tensors.select_token_ranges import PositionSelector
from meshwright.plan.sharding.sequence_sharding import MIN_TOKENS, TokenRange, num_positions, with_padding

# full tensor along a dim, from this rank's shard
GatherTokens = Callable[[torch.Tensor, int], torch.Tensor]
MIN_SHARED_NDIM = 3  # shared inputs of layers: masks and positional tables


@dataclass(frozen=True)
class TokenShard:
    """The tokens of this rank among `length`: those in `spans`.

    `gather` assembles the full tensor for glue, `gather_exactly` the same in a dtype that rounds nothing,
    `sum_over_ranks` adds what all ranks have, in the given
    dtype, if a few tokens or a sum suffice. Ranks that exchange heads have the tokens in `group_spans`
    together (empty: there are none). If `caches_slices`, slices are kept for the following layers; it is
    false if glue may write to them through memory that no hook sees.
    """

    length: int
    spans: tuple[TokenRange, ...]
    gather: GatherTokens = field(compare=False, repr=False, default=lambda local, dim: local)
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = field(
        compare=False, repr=False, default=lambda part: part
    )
    group_spans: tuple[TokenRange, ...] = field(compare=False, repr=False, default=())
    caches_slices: bool = field(compare=False, repr=False, default=True)
    gather_exactly: GatherTokens = field(compare=False, repr=False, default=lambda local, dim: local)
    # what selects these tokens, and others of samples of this length
    selector: PositionSelector = field(compare=False, repr=False, default_factory=PositionSelector)
    # slices, shared by all layers
    _slices: WeakTensorKeyDictionary = field(
        compare=False, repr=False, default_factory=WeakTensorKeyDictionary
    )
    # None: the mask itself
    _group_mask_rows: WeakTensorKeyDictionary = field(
        compare=False, repr=False, default_factory=WeakTensorKeyDictionary
    )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of this rank."""
        return num_positions(self.spans)

    @property
    def is_full(self) -> bool:
        """Whether this rank has all tokens in order."""
        return self.spans == ((0, self.length),) and self.length >= MIN_TOKENS

    def take_padded(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the slice of a full `tensor` along `dim` on which this rank runs, with padding tokens;
        differentiable.
        """
        return self._take_padded(tensor, dim, copy=True)

    def _take_padded(self, tensor: torch.Tensor, dim: int, *, copy: bool) -> torch.Tensor:
        """The same. With `copy`, the cached slice is a copy, since a view would keep the full tensor alive
        until backward.
        """
        if self.is_full:
            return tensor
        is_uncached = not self.caches_slices or tensor.ndim < MIN_SHARED_NDIM
        if is_uncached or tensor.requires_grad or tensor.is_inference() or isinstance(tensor, FakeTensor):
            return self.selector.select_spans(tensor, dim, with_padding(self.spans))
        slice_key, cached = (dim, tensor._version), self._slices.get(tensor)
        if cached is None or cached[0] != slice_key:
            # a view would keep the tensor, and so its entry, alive
            local_slice = self.selector.select_spans(tensor, dim, with_padding(self.spans)).detach()
            cached = self._slices[tensor] = (
                slice_key,
                local_slice.clone() if copy and _shares_larger_storage(local_slice, tensor) else local_slice,
            )
        return cached[1]

    def take_mask(self, mask: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Returns the slice of a mask that glue made, along its queries `dim`; None: it is the same for all
        queries.

        `group_mask_rows` then gives the rows of the slice for the ranks that exchange heads.
        """
        local_slice = mask if dim is None else self._take_padded(mask, dim, copy=not self.group_spans)
        if self.group_spans and not mask.requires_grad and local_slice not in self._group_mask_rows:
            self._group_mask_rows[local_slice] = (
                None
                if local_slice is mask
                else self.selector.select_spans(mask, dim or 0, self.group_spans).detach()
            )
        return local_slice

    def group_mask_rows(self, mask: torch.Tensor) -> torch.Tensor | None:
        """Returns the mask rows of the queries in `group_spans` for a mask from `take_mask`; None for any
        other tensor.
        """
        if mask not in self._group_mask_rows:
            return None
        mask_rows = self._group_mask_rows[mask]
        return mask if mask_rows is None else mask_rows

    def take_local(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the slice of a full `tensor` along `dim` that this rank has, without padding."""
        return tensor if self.is_full else self.selector.select_spans(tensor, dim, self.spans)

    def positions(self, device: torch.device | str) -> torch.Tensor:
        """Returns the positions of this rank's tokens, int64 [num_tokens]."""
        return self.take_padded(torch.arange(self.length, device=device), 0)


def _shares_larger_storage(local_slice: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `own` is a view of a larger storage; an expanded tensor counts with its real memory."""
    return (
        storage_id(local_slice) == storage_id(tensor)
        and local_slice.nbytes < tensor.untyped_storage().nbytes()
    )
