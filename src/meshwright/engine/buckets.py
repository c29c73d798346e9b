"""Gradients of several parameters as one contiguous buffer, so that one message carries them.

A bucket is made once and stays: `pack` copies gradients in and makes each `.grad` a view of its piece, so that later
micro-batches add in place and the optimizer reads the reduced values without a copy back.

    flat   [ w0.grad | w1.grad | w2.grad ]        w1.grad is flat[a:b].view(shape)
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from meshwright.core.program import Action


def carriers(actions: Sequence[Action]) -> dict[str, Action]:
    """For each PACK, by name, the action behind it that is the first to move what it packs: it names the bucket."""
    found: dict[str, Action] = {}
    moving: dict[str, Action] = {}
    for action in reversed(actions):
        if action.kind == "PACK" and action.tensors[0] in moving:
            found[action.name] = moving[action.tensors[0]]
        if action.transfer is not None:
            moving |= dict.fromkeys(action.tensors, action)
    return found


class Bucket:
    """One flat buffer of `dtype`, and a view of it per parameter, by logical name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = dict(parameters)
        first = next(iter(self.parameters.values()))  # the buffer is of its kind: on its device, and fake where it is fake
        self.flat = first.new_empty(sum(p.numel() for p in self.parameters.values()), dtype=dtype)
        self.views: dict[str, torch.Tensor] = {}
        start = 0
        for name, parameter in self.parameters.items():
            self.views[name] = self.flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()

    def stretch(self, names: Sequence[str]) -> torch.Tensor:
        """The gradients of `names`, which follow each other here, as one flat tensor."""
        start = self.views[names[0]].storage_offset() - self.flat.storage_offset()
        return self.flat[start : start + sum(self.views[name].numel() for name in names)]

    def pack(self, names: Iterable[str]) -> None:
        """Copy the gradients of `names` in; a parameter that backward did not reach has a gradient of zero."""
        for name in names:
            parameter, view = self.parameters[name], self.views[name]
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            if view.dtype == parameter.dtype:
                parameter.grad = view

    def unpack(self) -> None:
        """Copy the values back into the parameters' gradients, in the parameters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = self.views[name].to(parameter.dtype)
            else:
                parameter.grad.copy_(self.views[name])
