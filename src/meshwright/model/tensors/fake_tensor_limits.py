"""Tells errors that say what fake tensors cannot do from errors of the code that ran on them.

int(mask.sum())             needs a value that no fake tensor has: run it on real tensors
torch.cat([a, b], dim=1)    of sizes that do not fit: as wrong on real tensors
"""

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# Other messages of torch about fake tensors; the last is of grouped_mm, whose fake kernel is stricter.
FAKE_TENSOR_LIMITS = ("tensor subclass", "not allocated", "fake impl", "Expected inputs of BF16 type")


def depends_on_values(error: BaseException) -> bool:
    """Returns whether `error`, or its cause, says that the code needs values or kernels that fake tensors
    lack.
    """
    if isinstance(error, NEEDS_VALUES) or any(phrase in str(error) for phrase in FAKE_TENSOR_LIMITS):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and depends_on_values(cause)
