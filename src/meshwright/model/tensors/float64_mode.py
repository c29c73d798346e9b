"""Function mode in which a model computes in float64 throughout: a cast to float32 becomes one to float64.

Norms, routers and rotary tables of published models cast to float32 on purpose: in bfloat16 that gains
digits, in float64 it loses them. A sum over samples in float32 (the gradient of a norm's weight) has 7
digits, and two ways of splitting a batch round it differently, so no comparison to 1e-10 could hold. A model
in float64 therefore runs in this mode.

    x.float(), x.to(torch.float32), softmax(x, dtype=torch.float32)     the same in float64
    torch.zeros(3), torch.rand(3)                                       float64 instead of the default dtype

Every float32 argument is replaced, whatever the function, so tensors that agreed in dtype still do.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

FACTORY_FUNCTIONS = frozenset(
    {torch.zeros, torch.ones, torch.empty, torch.full, torch.rand, torch.eye, torch.linspace, torch.tensor}
)


class Float64Mode(TorchFunctionMode):
    """While active (`with`), torch functions on this thread make float64 tensors instead of float32 ones."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(map(_widen_dtype, args))
        kwargs = {name: _widen_dtype(value) for name, value in kwargs.items()} if kwargs else {}
        # the lowest float64 number does not fit a float32
        if func is torch.full and isinstance(args[-1] if len(args) > 1 else kwargs.get("fill_value"), float):
            kwargs = {
                **kwargs,
                "dtype": kwargs.get("dtype") or torch.float64,
            }
        result = func(*args, **kwargs)
        return (
            result.double()
            if func in FACTORY_FUNCTIONS and result.dtype == torch.float32 and not result.requires_grad
            else result
        )


def run_in_float64(module: nn.Module) -> None:
    """Makes `module` run its forward in this mode; changes the module in place."""
    module.forward = in_float64(module.forward)


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, run in this mode."""
    return partial(_call_in_float64, function)


def batch_in_float64(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns `batch` with its floating-point tensors in float64, the dtype of the parameters in a
    comparison.
    """
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def _call_in_float64(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with Float64Mode():
        return function(*args, **kwargs)


def _widen_dtype(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
