"""Weight stashing (PipeDream, plan/step/weight_stashing.py): keeps the weights of earlier steps for backwards
that need them.

    weight     ----> memory 0          memory 1     a weight of the module, which autograd graphs refer to
    stepped    ----> memory 0                       the optimizer's parameter: same memory, in no graph

    STASH          both point to memory 1, which starts as a copy; memory 0 stays; STEP writes into memory 1
    LOAD_STASHED   the weight points to memory 0, for a backward
    LOAD_LATEST    puts the latest weights back: the weight points to memory 1

Autograd saves either the weight itself, and reads during backward whatever it points to (norms), or a view,
which stays in the memory that it was made from (matrix products). Both are right: the memory of a version is
not written while it is stashed, and the weight points there while the backward of that version runs. The
optimizer steps a parameter of its own, so that autograd sees no write to the weight. The next STASH reuses
freed memory.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from meshwright.plan.step.program import Action
from meshwright.plan.strategy_interface import Handler


class WeightStash:
    """The stashed versions of `weights`, by name.

    The optimizer steps `optimizer_params`, in the same memory.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], optimizer_params: Mapping[str, nn.Parameter]
    ) -> None:
        self._weights = list(weights.values())
        self._optimizer_params = [optimizer_params.get(name) for name in weights]
        self._stashed: dict[str, list[torch.Tensor]] = {}
        self._free: list[list[torch.Tensor]] = []
        self._newest: list[torch.Tensor] | None = None
        self.handlers: dict[str, Handler] = {
            "STASH": self.stash,
            "LOAD_STASHED": self.load_stashed,
            "LOAD_LATEST": self.load_latest,
        }

    @property
    def nbytes(self) -> int:
        """The bytes of all memory except that of the latest version."""
        return sum(tensor.nbytes for tensors in (*self._stashed.values(), *self._free) for tensor in tensors)

    @torch.no_grad()
    def stash(self, action: Action) -> None:
        """Keeps the present weights under the name of `action.subject`.

        The optimizer steps a copy from now on.
        """
        old = [weight.data for weight in self._weights]
        new = self._free.pop() if self._free else [torch.empty_like(tensor) for tensor in old]
        torch._foreach_copy_(new, old)
        self._stashed[action.subject] = old
        self._set_weights(new)
        for parameter, tensor in zip(self._optimizer_params, new, strict=True):
            if parameter is not None:
                parameter.data = tensor

    def load_stashed(self, action: Action) -> None:
        """Points the weights to the version that `action.subject` names."""
        self._newest = [weight.data for weight in self._weights]
        self._set_weights(self._stashed[action.subject])

    def load_latest(self, action: Action) -> None:
        """Points the weights to the latest version, and frees the versions that `action` frees."""
        if self._newest is not None:
            self._set_weights(self._newest)
            self._newest = None
        for name in action.frees:
            if name in self._stashed:
                self._free.append(self._stashed.pop(name))

    def discard_all(self) -> None:
        """Points the weights to the latest version and frees all others, after a failed step."""
        self.load_latest(Action("LOAD_LATEST", frees=tuple(self._stashed)))

    def _set_weights(self, tensors: Iterable[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            weight.data = tensor
