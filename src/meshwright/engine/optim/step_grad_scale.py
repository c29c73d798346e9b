"""Clips or divides gradients inside the next optimizer step, which reads them anyway."""

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import all_param_groups


def clip_in_step(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    norm: torch.Tensor,
    divisor: torch.Tensor,
    max_norm: float,
) -> None:
    """Makes the step divide gradients of total `norm` by `divisor`, or clip them to `max_norm` as
    torch's clip_grad_norm_ does.
    """
    if not _divide_while_reading(optimizers, parameters, divisor):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def divide_in_step(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], divisor: float
) -> None:
    """Makes the step divide the gradients of `parameters` by `divisor`."""
    if not _divide_while_reading(optimizers, parameters, torch.tensor(divisor)):
        torch._foreach_div_(
            [parameter.grad for parameter in parameters if parameter.grad is not None], divisor
        )


def _divide_while_reading(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], divisor: torch.Tensor
) -> bool:
    """Makes the optimizers divide all gradients by `divisor`; returns False when they cannot.

    A fused optimizer of torch divides while it reads them, by the factor that gradient scalers pass: one pass
    over the gradients less, 8 of 440 ms on a 25 M model. It takes that factor in float32, which float64
    gradients cannot use.
    """
    known = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)  # others may not look at it
    fused = all(type(optimizer) in known for optimizer in optimizers) and all(
        g.get("fused") for g in all_param_groups(optimizers)
    )
    if fused and all(parameter.dtype != torch.float64 for parameter in parameters):
        for optimizer in optimizers:
            vars(optimizer)["grad_scale"] = (
                divisor.float().to(parameters[0].device) if parameters else divisor.float()
            )
        return True
    return False


def clear_grad_scale(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Lets the next step use its gradients as they are."""
    for optimizer in optimizers:
        vars(optimizer).pop("grad_scale", None)
