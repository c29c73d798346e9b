"""Which tokens of a row this rank has, and what of a tensor that has all of them is this rank's.

What glue has made for all tokens, a mask or a table by position, is cut once for all layers that take it in. Ranks that exchange
heads (strategies/sequence/heads.py) need a mask's rows of each other's queries; who is given its own rows is told those too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.model.tensors.pytree import storage_id
from meshwright.model.tensors.token_slices import select_spans
from meshwright.plan.model_spec.sequence_info import MIN_TOKENS, TokenRange, num_positions, with_padding

GatherTokens = Callable[
    [torch.Tensor, int], torch.Tensor
]  # all tokens of a tensor along a dim, from this rank's
MIN_SHARED_NDIM = 3  # of what layers are given alike: masks, and tables by position


@dataclass(frozen=True)
class TokenShard:
    """Which of `length` tokens this rank has: those in `spans`. `bring` puts all together, where glue needs them.

    `add` gives the sum of what all ranks have, in the dtype that it is given, where a few tokens or the sum of all will do. Ranks
    that exchange heads have the tokens in `together` among them; empty: nobody does. It `keeps` what it has cut for the layers
    behind; not where what they are handed may have been written with nobody told.
    """

    length: int
    spans: tuple[TokenRange, ...]
    gather: GatherTokens = field(compare=False, repr=False, default=lambda local, dim: local)
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = field(
        compare=False, repr=False, default=lambda part: part
    )
    group_spans: tuple[TokenRange, ...] = field(compare=False, repr=False, default=())
    caches_slices: bool = field(compare=False, repr=False, default=True)
    _slices: WeakTensorKeyDictionary = field(
        compare=False, repr=False, default_factory=WeakTensorKeyDictionary
    )  # for all layers
    _group_mask_rows: WeakTensorKeyDictionary = field(
        compare=False, repr=False, default_factory=WeakTensorKeyDictionary
    )  # None: as it is

    @property
    def num_tokens(self) -> int:
        """How many tokens this rank has."""
        return num_positions(self.spans)

    @property
    def is_full(self) -> bool:
        """Whether these are all tokens, in their order."""
        return self.spans == ((0, self.length),) and self.length >= MIN_TOKENS

    def take_padded(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank runs of a `tensor` that has all tokens along `dim`; differentiable."""
        return self._take_padded(tensor, dim, apart=True)

    def _take_padded(self, tensor: torch.Tensor, dim: int, *, apart: bool) -> torch.Tensor:
        """The same; `apart`: for all layers in memory of its own, which else would hold all tokens until backward."""
        if self.is_full:
            return tensor
        alone = not self.caches_slices or tensor.ndim < MIN_SHARED_NDIM
        if alone or tensor.requires_grad or tensor.is_inference() or isinstance(tensor, FakeTensor):
            return select_spans(tensor, dim, with_padding(self.spans))
        said, known = (dim, tensor._version), self._slices.get(tensor)
        if known is None or known[0] != said:
            # a view would keep the tensor, and with it the entry, for good
            own = select_spans(tensor, dim, with_padding(self.spans)).detach()
            known = self._slices[tensor] = (
                said,
                own.clone() if apart and _shares_larger_storage(own, tensor) else own,
            )
        return known[1]

    def take_mask(self, mask: torch.Tensor, dim: int | None) -> torch.Tensor:
        """`of` a mask that glue has made for all queries, which are `dim`; None: it is the same for all of them.

        Whoever is handed what comes out can ask for its `rows_together`.
        """
        own = mask if dim is None else self._take_padded(mask, dim, apart=not self.group_spans)
        if self.group_spans and not mask.requires_grad and own not in self._group_mask_rows:
            self._group_mask_rows[own] = (
                None if own is mask else select_spans(mask, dim or 0, self.group_spans).detach()
            )
        return own

    def group_mask_rows(self, mask: torch.Tensor) -> torch.Tensor | None:
        """Of a mask that `of_mask` has given, the rows of the queries in `together`; None of any other tensor."""
        if mask not in self._group_mask_rows:
            return None
        rows = self._group_mask_rows[mask]
        return mask if rows is None else rows

    def take_local(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank has of a `tensor` that has all tokens along `dim`."""
        return tensor if self.is_full else select_spans(tensor, dim, self.spans)

    def positions(self, device: torch.device | str) -> torch.Tensor:
        """The positions of this rank's tokens, int64."""
        return self.take_padded(torch.arange(self.length, device=device), 0)


def _shares_larger_storage(own: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether it lies in the memory of `tensor`, and would take less by itself; what is expanded lies there once."""
    return storage_id(own) == storage_id(tensor) and own.nbytes < tensor.untyped_storage().nbytes()
