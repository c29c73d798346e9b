"""Follows tensors with a size that depends on values, such as the tokens that a router gives to one expert.

    rows, place = torch.where(experts == 3)      n rows: a number that no plan knows
    up(x[rows])                                  n rows
    out.index_add_(0, rows, ...)                 as many rows as `out` has

The bytes that ranks send are planned. A layer that is given so many rows is computed in full on every rank.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

# results have the shape of the first operand
SHAPED_BY_FIRST = frozenset(
    ("index_add", "index_put", "index_copy", "index_fill", "scatter", "scatter_add", "masked_scatter")
)


class ValueDependentSizes(TorchDispatchMode):
    """Knows, of the tensors made while it is active, those with a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes = WeakTensorKeyDictionary()

    def has_such_rows(self, tensor: torch.Tensor) -> bool:
        """Returns whether a dim of `tensor`, other than the last one, depends on values."""
        return self._sizes.get(tensor) in tensor.shape[:-1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if _depends_on_values(func, args):
            for result in results:
                self._sizes[result] = result.shape[0]
            return out
        name = func._overloadpacket.__name__
        by_first = name.rstrip("_") in SHAPED_BY_FIRST or name.endswith("_")
        operands = tree_leaves(args[:1] if by_first else (args, kwargs))
        sizes = {self._sizes.get(leaf) for leaf in operands if isinstance(leaf, torch.Tensor)} - {None}
        for result in results if sizes else ():
            if found := sizes.intersection(result.shape):
                self._sizes[result] = found.pop()
        return out


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    masks = (leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, torch.Tensor))
    return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in masks)
