"""A tensor that stands for a leaf where somebody may write into it in place, which autograd refuses for leaves."""

from typing import Any

import torch


class GradAlias(torch.autograd.Function):
    """`values` as a tensor that is no leaf, whose gradient is that of `leaf`: glue or a block may then write into it in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def make_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, known by an identity of its own."""
    with torch._C.DisableTorchFunction():
        return GradAlias.apply(tensor, tensor) if tensor.requires_grad else tensor.detach()


def aliased_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The leaf that `tensor` stands for; a tensor that is no alias, itself."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != "AliasBackward":
        return tensor
    return node.next_functions[0][0].variable
