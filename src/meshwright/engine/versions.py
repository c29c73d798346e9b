"""STASH, RESTORE and RENEW: weights as they were some steps ago, for the backwards that need those (core/versions.py).

    weight    ----> memory 0          memory 1          a weight of the module, which graphs have met
    stepped   ----> memory 0                            what the optimizer steps: the same memory, and no graph has met it

    STASH     both point to memory 1, which begins as a copy; memory 0 stays as it is       STEP writes into memory 1
    RESTORE   the weight points to memory 0, for a backward                                 RENEW points it to memory 1 again

Of a weight autograd saves either itself, and looks when backward comes where it points to (norms), or a view, which stays in the
memory that it was made from (products of matrices). Both are right: the memory of a version is not written into while it is
kept, and the weight points there while the backward of that version runs. The optimizer steps a parameter of its own, so that
autograd sees no write to the weight. Memory that is let go of serves the next STASH.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from meshwright.core.program import Action
from meshwright.core.strategy import Handler


class Versions:
    """Of `weights`, by name, the versions that are kept; `stepped` are what the optimizer steps in the same memory."""

    def __init__(self, weights: Mapping[str, nn.Parameter], stepped: Mapping[str, nn.Parameter]) -> None:
        self._weights = list(weights.values())
        self._stepped = [stepped.get(name) for name in weights]
        self._kept: dict[str, list[torch.Tensor]] = {}
        self._free: list[list[torch.Tensor]] = []
        self._newest: list[torch.Tensor] | None = None
        self.handlers: dict[str, Handler] = {"STASH": self.stash, "RESTORE": self.restore, "RENEW": self.renew}

    @property
    def nbytes(self) -> int:
        """The bytes of all memory beside that of the newest version."""
        return sum(tensor.nbytes for held in (*self._kept.values(), *self._free) for tensor in held)

    @torch.no_grad()
    def stash(self, action: Action) -> None:
        """Keep the weights as they are under the name of `action.subject`; what is stepped next is a copy."""
        old = [weight.data for weight in self._weights]
        new = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in old]
        torch._foreach_copy_(new, old)
        self._kept[action.subject] = old
        self._point(new)
        for parameter, tensor in zip(self._stepped, new, strict=True):
            if parameter is not None:
                parameter.data = tensor

    def restore(self, action: Action) -> None:
        """Have the weights be those that `action.subject` names."""
        self._newest = [weight.data for weight in self._weights]
        self._point(self._kept[action.subject])

    def renew(self, action: Action) -> None:
        """Have the weights be the newest ones; let go of those that `action` frees."""
        if self._newest is not None:
            self._point(self._newest)
            self._newest = None
        for name in action.frees:
            if name in self._kept:
                self._free.append(self._kept.pop(name))

    def forget(self) -> None:
        """Have the newest weights, and let go of all others: a step has not come to its end."""
        self.renew(Action("RENEW", frees=tuple(self._kept)))

    def _point(self, tensors: Iterable[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.data = tensor
