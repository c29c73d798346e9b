"""Selects ranges of token positions along a dim of a tensor; index tensors stay on the device."""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.plan.sharding.sequence_sharding import TokenRange

MAX_NARROW_SPANS = 8  # spans that are cut out one by one; of more, elements are picked
MAX_INDICES = 64  # index tensors that are kept


def span_positions(spans: Sequence[TokenRange]) -> np.ndarray:
    """Returns the positions in `spans`, in their order, int64."""
    if not spans:
        return np.zeros(0, np.int64)
    begins, ends = np.array(spans, np.int64).T
    counts = ends - begins
    return np.arange(counts.sum()) + np.repeat(begins - counts.cumsum() + counts, counts)


def index_tensor(positions: np.ndarray | Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns `positions` as a tensor on `device`; the host does not wait for a GPU."""
    found = torch.tensor(positions)
    if device.type == "cpu":
        return found
    pinned = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return pinned.copy_(found).to(device, non_blocking=True)


class PositionSelector:
    """Selects positions along a dim of tensors; an index tensor is copied to their device once."""

    def __init__(self) -> None:
        self._indices: dict[Hashable, torch.Tensor] = {}

    def select_spans(self, tensor: torch.Tensor, dim: int, spans: tuple[TokenRange, ...]) -> torch.Tensor:
        """Returns the slices of `tensor` in `spans` along `dim`, concatenated; differentiable."""
        if len(spans) > MAX_NARROW_SPANS:
            return tensor.index_select(dim, self._index(spans, tensor, lambda: span_positions(spans)))
        parts = [tensor.narrow(dim, begin, end - begin) for begin, end in spans or ((0, 0),)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def select(self, tensor: torch.Tensor, dim: int, positions: tuple[int, ...]) -> torch.Tensor:
        """Returns the elements of `tensor` at `positions` along `dim`; differentiable."""
        return tensor.index_select(dim, self._index(positions, tensor, lambda: positions))

    def add_to_spans(
        self, tensor: torch.Tensor, dim: int, spans: tuple[TokenRange, ...], added: torch.Tensor
    ) -> None:
        """Adds `added` to the slices of `tensor` in `spans` along `dim`, in place."""
        tensor.index_add_(dim, self._index(spans, tensor, lambda: span_positions(spans)), added)

    def _index(
        self, key: Hashable, tensor: torch.Tensor, positions: Callable[[], np.ndarray | Sequence[int]]
    ) -> torch.Tensor:
        key = key, tensor.device
        index = self._indices.pop(key, None)
        if index is None or _fake_mode(index) is not _fake_mode(tensor):
            index = index_tensor(positions(), tensor.device)
        if len(self._indices) >= MAX_INDICES:
            del self._indices[next(iter(self._indices))]  # the one that was not used for longest
        self._indices[key] = index
        return index


def _fake_mode(tensor: torch.Tensor) -> object:
    """Returns the mode of a fake tensor, which takes those of no other one; None for a real tensor."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None
