"""Gradients of several parameters as one contiguous buffer, so that one message carries them.

A bucket is made once and stays: `pack` copies gradients in and makes each `.grad` a view of its piece, so that later
micro-batches add in place and the optimizer reads the reduced values without a copy back.

    flat   [ w0.grad | w1.grad | w2.grad ]        w1.grad is flat[a:b].view(shape)
"""

from collections.abc import Sequence

import torch
from torch import nn


class Bucket:
    """One flat buffer of `dtype`, and a view of it per parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        self.parameters = tuple(parameters)
        self.flat = torch.empty(sum(p.numel() for p in self.parameters), dtype=dtype, device=self.parameters[0].device)
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in self.parameters:
            self.views.append(self.flat[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()

    def pack(self) -> None:
        """Copy the gradients in; a parameter that backward did not reach has a gradient of zero."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            if view.dtype == parameter.dtype:
                parameter.grad = view

    def unpack(self) -> None:
        """Copy the values back into the parameters' gradients, in the parameters' dtype."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)
