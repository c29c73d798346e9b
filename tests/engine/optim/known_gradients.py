"""Steps an optimizer with known gradients: on whole weights, and on flat shards of them."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

LR, DECAY = 0.01, 0.1
Make = Callable[[list[dict]], torch.optim.Optimizer]


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A weight of the usual size."""
    return (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)).to(
        dtype
    )


def gradients(*shape: int, steps: int = 5, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """One gradient per step: their sizes span decades within a weight, and their mean drifts; one element is
    always zero.
    """
    generator = torch.Generator().manual_seed(7)
    found = []
    for step in range(steps):
        sizes = 10 ** torch.linspace(-3, 0, max(1, torch.Size(shape).numel()), dtype=torch.float64).view(
            shape
        )
        one = sizes * (torch.randn(shape, generator=generator, dtype=torch.float64) + 0.3 * step)
        if one.numel() > 1:
            one.view(-1)[-1] = 0.0
        found.append(one.to(dtype))
    return found


def groups(parameters: list[nn.Parameter], lr: float = LR, decay: float = DECAY) -> list[dict]:
    """One group, as the engine makes them."""
    return [{"params": parameters, "lr": lr, "weight_decay": decay}]


def stepped(
    make: Make, begin: torch.Tensor, grads: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """`begin` after a step with each gradient of `grads`, and the optimizer."""
    parameter = nn.Parameter(begin.clone())
    optimizer = make(groups([parameter]))
    for gradient in grads:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach(), optimizer


def stepped_in_shards(
    make: Make, begin: torch.Tensor, grads: list[torch.Tensor], cuts: list[int]
) -> torch.Tensor:
    """The same, when flat pieces that end at `cuts` are stepped as parameters of their own."""
    ends = [0, *cuts, begin.numel()]
    found = [
        stepped(make, begin.reshape(-1)[low:high], [each.reshape(-1)[low:high] for each in grads])[0]
        for low, high in pairwise(ends)
    ]
    return torch.cat(found).view(begin.shape)


def moments(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of all state but counters."""
    kept = [
        value
        for held in optimizer.state.values()
        for value in held.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(value.nbytes for value in kept if value.ndim)
