"""Describes a call of a torch function: its name, the line of the model that makes it, constant arguments,
and whether the model will make it again in the backward.
"""

import sys
from typing import Any

import torch

CHECKPOINT_MODULE = "torch.utils.checkpoint"


def function_title(func: Any) -> str:
    """Returns the name of a torch function as a mode receives it; for a property getter, the property and "
    of".
    """
    return f"{func.__self__.__name__} of" if func.__name__ == "__get__" else func.__name__


def caller_line() -> str:
    """Returns the line of the model's code that makes the current call, as "file:line"."""
    frame = sys._getframe(1)
    while frame is not None and (
        "/torch/" in frame.f_code.co_filename or "/meshwright/model/" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}" if frame is not None else "?"


def is_constant(leaf: Any) -> bool:
    """Returns whether a leaf of the arguments is the same in every run: neither a tensor nor an arbitrary
    object.
    """
    return leaf is None or isinstance(
        leaf, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
    )


def in_user_checkpoint() -> bool:
    """Returns whether the running code is inside torch.utils.checkpoint, of either kind, by the model
    itself.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == CHECKPOINT_MODULE:
        return True
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != CHECKPOINT_MODULE:
        frame = frame.f_back
    return frame is not None
