"""Autocast by the rules of accelerators, in trials on fake tensors of the CPU.

Which operators autocast runs in float32 depends on the device: a layer norm, a softmax or a sum of bfloat16
is bfloat16 on a CPU and float32 on a GPU. So what a block keeps, and the dtype of what it passes on, are
those of the device that trains only under its rules. They need no device here:

    both                     matrix products, convolutions, attention       compute dtype
    CPU                      other operators                                dtype of their operands
    accelerators             FLOAT32_FUNCTIONS, with operands cast first    float32

The table is that of CUDA, which others follow; a test compares it with torch's own rules. Functions that the
CPU alone runs in float32 (decompositions of matrices, pooling in three dimensions) keep that of the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT32_NAMES = frozenset(
    (
        *(
            "exp",
            "expm1",
            "log",
            "log10",
            "log1p",
            "log2",
            "pow",
            "__pow__",
            "__rpow__",
            "square",
            "reciprocal",
            "rsqrt",
        ),
        *("acos", "arccos", "arcsin", "asin", "cosh", "sinh", "tan", "erfinv"),
        *("softmax", "log_softmax", "softmin", "softplus", "gumbel_softmax", "logsumexp"),
        *(
            "layer_norm",
            "group_norm",
            "rms_norm",
            "local_response_norm",
            "normalize",
            "norm",
            "norm_except_dim",
            "renorm",
        ),
        *("frobenius_norm", "matrix_norm", "nuclear_norm", "vector_norm"),
        *("cosine_similarity", "dist", "pairwise_distance", "pdist"),
        *("sum", "sum_to_size", "cumsum", "cumprod", "trapezoid", "trapz", "cumulative_trapezoid"),
        *("multilabel_soft_margin_loss", "triplet_margin_with_distance_loss"),
        *("interpolate", "upsample", "upsample_bilinear", "upsample_nearest"),
    )
)
NAMESPACES = (torch, F, torch.linalg, torch.Tensor)
FLOAT32_FUNCTIONS = frozenset(
    getattr(space, name) for space in NAMESPACES for name in FLOAT32_NAMES & set(dir(space))
)


@contextmanager
def trial_autocast(dtype: torch.dtype, device_type: str) -> Iterator[None]:
    """Runs products in `dtype`, and all else as autocast does on a device of that type."""
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        if device_type == "cpu":
            yield
            return
        with _Float32Functions():
            yield


class _Float32Functions(TorchFunctionMode):
    """Casts operands of `FLOAT32_FUNCTIONS` to float32 where autocast is on, unless a dtype is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operands = args, kwargs or {}
        if func in FLOAT32_FUNCTIONS and torch.is_autocast_enabled("cpu") and not _has_dtype(operands):
            operands = tree_map(_widened, operands)
        return func(*operands[0], **operands[1])


def _has_dtype(operands: Any) -> bool:
    return any(isinstance(each, torch.dtype) for each in tree_leaves(operands))


def _widened(operand: Any) -> Any:
    is_half = isinstance(operand, torch.Tensor) and operand.dtype in HALF_DTYPES
    return operand.to(torch.float32) if is_half else operand
