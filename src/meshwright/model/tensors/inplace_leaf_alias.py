"""Non-leaf alias of a leaf: the model may write into it in place, which autograd refuses for leaves."""

from typing import Any

import torch


class GradAlias(torch.autograd.Function):
    """`values` as a non-leaf tensor whose gradient is that of `leaf`; it may be written in place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def make_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with the same values and its own identity."""
    with torch._C.DisableTorchFunction():
        return GradAlias.apply(tensor, tensor) if tensor.requires_grad else tensor.detach()


def aliased_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the leaf of which `tensor` is an alias; `tensor` itself if it is no alias."""
    node: Any = tensor.grad_fn
    if node is None or node.name() != f"{GradAlias.__name__}Backward":
        return tensor
    return node.next_functions[0][0].variable
