"""Function and dispatch modes over glue (code between blocks)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.tensors.pytree import tree_tensors

RANDOM_GLUE_FIX = (
    "set the layer drop to 0 where it is one (in transformers' configs: layerdrop, encoder_layerdrop, "
    "decoder_layerdrop)"
)
RANDOM_GLUE_FIX += ", or draw them in front of the first block, or inside one"


CallFunction = Callable[[Any, Any, Any], Any]  # of a function, its arguments and keyword arguments


def call_unchanged(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of `func(*args, **kwargs)`."""
    return func(*args, **kwargs)


class InterceptMode(TorchFunctionMode):
    """While active and not `paused`, the result of each torch call is `intercept(func, args, kwargs)`."""

    def __init__(self, intercept: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.paused, self._intercept = False, intercept

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {})) if self.paused else self._intercept(func, args, kwargs or {})


def calls_are_intercepted() -> bool:
    """Returns whether an InterceptMode that is not paused is active on this thread."""
    stack = _get_current_function_mode_stack()
    return any(isinstance(mode, InterceptMode) and not mode.paused for mode in stack)


class ValueReadMode(TorchDispatchMode):
    """Notes whether an operation reads a value, or makes a tensor whose shape depends on values."""

    reads_values = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        looks = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if (
            looks and func.overloadpacket is torch.ops.aten.index
        ):  # only masks make its shape depend on values
            looks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tree_tensors(args[1:]))
        self.reads_values = self.reads_values or looks
        return func(*args, **(kwargs or {}))
