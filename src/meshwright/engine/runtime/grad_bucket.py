"""Buckets of gradients: the gradients of several parameters as one contiguous buffer, which one message
carries.

A bucket is made once and stays: `pack` copies gradients in and makes each `.grad` a view of its part, so that
later microbatches accumulate in place and the optimizer reads the reduced values without a copy back.

    buffer   [ w0.grad | w1.grad | w2.grad ]        w1.grad is buffer[a:b].view(shape)

On an accelerator each gradient begins at a multiple of 128 bytes; the padding between is zero, and stays so.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from meshwright.plan.sharding.flat_param import round_up
from meshwright.plan.step.program import Action


def bucket_actions(actions: Sequence[Action]) -> dict[str, Action]:
    """Returns for each PACK, by name, the first later action that moves its gradients.

    It names the bucket.
    """
    bucket_of: dict[str, Action] = {}
    moved_by: dict[str, Action] = {}
    for action in reversed(actions):
        if action.kind == "PACK" and action.tensors[0] in moved_by:
            bucket_of[action.name] = moved_by[action.tensors[0]]
        if action.transfer is not None:
            moved_by |= dict.fromkeys(action.tensors, action)
    return bucket_of


class GradBucket:
    """One flat buffer of `dtype`, and a view of it per parameter, by logical name.

    Each view begins at a multiple of `align_numel` elements.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, align_numel: int = 1
    ) -> None:
        self.parameters = dict(parameters)
        self._sizes = {name: round_up(each.numel(), align_numel) for name, each in self.parameters.items()}
        # the buffer is of its kind: on its device, and fake where it is fake
        first = next(iter(self.parameters.values()))
        self.buffer = first.new_empty(sum(self._sizes.values()), dtype=dtype)
        if align_numel > 1:
            self.buffer.zero_()
        self.views: dict[str, torch.Tensor] = {}
        start = 0
        for name, parameter in self.parameters.items():
            self.views[name] = self.buffer[start : start + parameter.numel()].view(parameter.shape)
            start += self._sizes[name]

    def flat_gradients(self, names: Sequence[str]) -> torch.Tensor:
        """Returns the gradients of `names`, which are neighbours here, as one flat tensor, with the padding
        behind each.
        """
        start = self.views[names[0]].storage_offset() - self.buffer.storage_offset()
        return self.buffer[start : start + sum(self._sizes[name] for name in names)]

    def pack(self, names: Iterable[str]) -> None:
        """Copies the gradients of `names` in; zeros where backward did not reach a parameter."""
        pairs = [(self.parameters[name], self.views[name]) for name in names]
        copy_gradients([view for _, view in pairs], [parameter.grad for parameter, _ in pairs])
        for parameter, view in pairs:
            if view.dtype == parameter.dtype:
                parameter.grad = view

    def unpack(self) -> None:
        """Copies the values back into the parameters' gradients, in the parameters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.empty_like(self.views[name], dtype=parameter.dtype)
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        torch._foreach_copy_(gradients, list(self.views.values()))


def copy_gradients(places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    """Copies `gradients` to `places`, zeros where there is none: on a GPU, with one kernel for many."""
    pairs = list(zip(places, gradients, strict=True))
    absent = [place for place, gradient in pairs if gradient is None]
    found = [gradient for gradient in gradients if gradient is not None]
    if absent:
        torch._foreach_zero_(absent)
    if found:
        torch._foreach_copy_([place for place, gradient in pairs if gradient is not None], found)
