"""Keeps of an RMS norm what the kernel of accelerators keeps, in trials on fake tensors of the CPU.

What autograd saves depends on the kernel, so on the device. Fake tensors on "cuda" cannot tell in a build of
torch for CPUs: attention takes the formula there, because no fused kernel is registered, and autograd asks
for a guard of the device, without which the process ends. So the trial runs on the CPU, and this table says
what differs. Per operator on x, with R rows (tokens) and 16-bit x:

    operator            the CPU keeps              CUDA keeps                       counted
    attention           q, k, v, out, mask, and    the same, and the state of the   as on the CPU
                        float32 log-sum-exp        generator (16 bytes)
    rms_norm            float32 x, normalized x,   x, float32 rstd: 4 R             as on CUDA
                        and factors: 8 x.numel
    layer, group norm   x, mean, rstd: 4 R         x, float32 mean, rstd: 8 R       as on the CPU
    cross-entropy       log-probabilities          the same                         as on the CPU
    grouped product     its operands               the same                         as on the CPU
    dropout             that of the library, the same on each device                as on the CPU

CUDA's RMS norm is fused where x and weight have one dtype (`_fused_rms_norm` in torch's derivatives.yaml
saves its input, rstd and weight); else it is the formula, as on the CPU. Limits: nothing of it was measured
on a GPU. With a mask, memory-efficient attention rounds the log-sum-exp up to 32 queries, and may copy the
mask; the workspaces of libraries are not counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch.overrides import TorchFunctionMode


@contextmanager
def trial_norms(device_type: str) -> Iterator[None]:
    """Runs RMS norms as a device of that type does."""
    if device_type == "cpu":
        yield
        return
    with _FusedRMSNorms():
        yield


class _FusedRMSNorms(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.rms_norm, torch.rms_norm) and _is_fused(*args, **(kwargs or {})):
            return _fused(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_fused(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> bool:
    return weight is None or weight.dtype == input.dtype


def _fused(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    return _RMSNorm.apply(input, len(normalized_shape), weight)


class _RMSNorm(torch.autograd.Function):
    """Makes tensors of the right sizes, each by one operator that reads what the kernel reads."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_dims: int, weight: torch.Tensor | None) -> torch.Tensor:
        kept = rows.shape[: rows.ndim - num_dims] + (1,) * num_dims
        rstd = rows.new_empty(kept, dtype=torch.float32)
        ctx.save_for_backward(rows, rstd, weight)
        return rows * 1.0 if weight is None else rows * weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor | None]:
        rows, _, weight = ctx.saved_tensors
        gradient = grads[0]
        of_weight = None if weight is None else gradient.sum_to_size(weight.shape)
        return gradient * rows, None, of_weight
