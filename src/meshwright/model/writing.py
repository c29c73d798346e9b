"""Writing in glue, where a rank has some of the tokens: what is brought together is another tensor than what it came from.

    hidden[:, 0] = 0         refused: of the tokens apart, some would be written, and who asks for all of them gets others
    hidden.mul_(2)           done on the tokens that are here, and apart as before
    first = hidden[:, :1]
    first.mul_(2)            refused: on one device `hidden` would see it
    table.add_(hidden)       done with all tokens

What is refused would be lost, and on one device it is not.
"""

from collections.abc import Mapping
from typing import Any

import torch

from meshwright.core.errors import PlanError

_WRITES = ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
WRITES = frozenset(f"__{each}__" for each in _WRITES)
FLAGS = frozenset(("requires_grad_",))


def written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The tensor into which torch's function of this name, underscores and all, writes; None where it makes a new one."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    within = name in WRITES or (name.endswith("_") and not name.startswith("__") and name not in FLAGS)
    first = args[0] if within and args else None
    return first if isinstance(first, torch.Tensor) else None


def refused(name: str) -> PlanError:
    """What to raise where glue writes, by the function `name`, and not all would see it."""
    text = f"glue writes ('{name}') into a tensor of which each rank has some of the tokens"
    return PlanError(text, fix="make a new tensor there (torch.where, torch.cat, clone), or write within a block", where="model")


class Brought:
    """What glue was given of tokens that are `apart`, a kind of tensor, in a trial where that is the same memory."""

    def __init__(self, apart: type[torch.Tensor]) -> None:
        self._apart = apart
        self._kept = list[torch.Tensor]()  # so that nobody else gets the memory
        self._memory = set[int]()

    def add(self, tensor: torch.Tensor) -> None:
        """Glue is given `tensor`."""
        self._kept.append(tensor)
        self._memory.add(_memory(tensor))

    def watch(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise PlanError where glue, by the function `name`, writes into some of it."""
        into = written(name, args, kwargs)
        if into is not None and type(into) is not self._apart and _memory(into) in self._memory:
            raise refused(name)


def _memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()._cdata
