"""Tells errors that say what fake tensors cannot do from errors of the code that ran on them.

int(mask.sum())             needs a value that no fake tensor has: run it on real tensors
torch.cat([a, b], dim=1)    of sizes that do not fit: as wrong on real tensors
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# Other messages of torch about fake tensors; the last is of grouped_mm, whose fake kernel is stricter.
FAKE_TENSOR_LIMITS = ("tensor subclass", "not allocated", "fake impl", "Expected inputs of BF16 type")


@contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Keeps torch from printing the traceback of an operation that fails on fake tensors; the error that it
    raises says all.
    """
    torch_logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        torch_logger.setLevel(level)


def depends_on_values(error: BaseException) -> bool:
    """Returns whether `error`, or its cause, says that the code needs values or kernels that fake tensors
    lack.
    """
    if isinstance(error, NEEDS_VALUES) or any(phrase in str(error) for phrase in FAKE_TENSOR_LIMITS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and depends_on_values(cause)


def asks_for_device(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operation asks for the device of a fake tensor, which the tensor itself knows.

    These are as frequent as all other operations together, and cost as much on the way through a mode.
    """
    return func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
