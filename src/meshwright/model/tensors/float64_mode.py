"""float64 means float64: while a model computes in it, a cast to float32 in its code casts to float64 instead.

Norms, routers and rotary tables of published models cast to float32 on purpose: in bfloat16 that is a gain of digits, in
float64 a loss. What is summed over samples in float32 (the gradient of a norm's weight) has 7 digits, and two ways of
dividing a batch round them differently: no comparison to 1e-10 could hold. So a model made in float64 runs in this mode.

    x.float(), x.to(torch.float32), softmax(x, dtype=torch.float32)     the same in float64
    torch.zeros(3), torch.rand(3)                                       float64 where the default dtype was meant

Every mention of float32 is widened, whatever it is applied to, so that tensors that agreed in dtype still do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FACTORY_FUNCTIONS = frozenset(
    {torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.eye, torch.linspace, torch.tensor}
)


class Float64Mode(TorchFunctionMode):
    """While active (`with`), what torch functions on this thread would make in float32 they make in float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(map(_widen_dtype, args))
        kwargs = {name: _widen_dtype(value) for name, value in kwargs.items()} if kwargs else {}
        if func is torch.full and isinstance(args[-1] if len(args) > 1 else kwargs.get("fill_value"), float):
            kwargs = {
                **kwargs,
                "dtype": kwargs.get("dtype") or torch.float64,
            }  # the lowest number of float64 is none of float32
        made = func(*args, **kwargs)
        return (
            made.double()
            if func in FACTORY_FUNCTIONS and made.dtype == torch.float32 and not made.requires_grad
            else made
        )


def run_in_float64(module: nn.Module) -> None:
    """Have `module` run its forward in this mode, in place."""
    module.forward = in_float64(module.forward)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run in this mode."""
    return partial(_call_in_float64, function)


def _call_in_float64(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with Float64Mode():
        return function(*args, **kwargs)


def _widen_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
