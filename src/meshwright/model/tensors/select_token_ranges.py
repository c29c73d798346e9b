"""Selects ranges of token positions along a dim of a tensor."""

from collections.abc import Sequence

import numpy as np
import torch

from meshwright.plan.sharding.sequence_sharding import TokenRange

MAX_NARROW_SPANS = 8  # spans that are cut out one by one; of more, elements are picked


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


def select_spans(tensor: torch.Tensor, dim: int, spans: Sequence[TokenRange]) -> torch.Tensor:
    """Returns the slices of `tensor` in `spans` along `dim`, concatenated; differentiable."""
    if len(spans) > MAX_NARROW_SPANS:
        return tensor.index_select(dim, index_tensor(span_positions(spans), tensor.device))
    parts = [tensor.narrow(dim, begin, end - begin) for begin, end in spans or ((0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
