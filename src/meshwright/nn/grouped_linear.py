"""Multiplies the rows of each group with the matrix of that group: one product per expert.

    rows [N, D]         a a a | b | d d | .        ends [E] = 3 4 4 6: c has no row, one row no group
    weight [E, H, D]    A B C D
    result [N, H]       A a, A a, A a, B b, D d, D d, undefined

    drows = the same product with the transposed matrices,    dweight[e] = sum over its rows of grad x row

All sizes follow from the shapes of the operands; the number of rows of a group does not matter. So the
operators run on fake tensors, and a plan knows their memory and flops. Rows behind the last group cost no
flops; their results and gradients are undefined.

Cost: one gradient of the size of `weight`. The kernel is `torch.nn.functional.grouped_mm` where it takes the
dtype and the sizes (multiples of 16 bytes). Elsewhere (float64, odd sizes) it is a loop over groups, which
reads `ends` into Python: on a GPU it waits for the device.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the field's name

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL_ALIGNMENT = 16  # bytes

# `torch.library.custom_op` would import torch's compiler at the first call
torch.library.define("meshwright::grouped_linear", "(Tensor rows, Tensor weight, Tensor ends) -> Tensor")
torch.library.define("meshwright::grouped_outer", "(Tensor grad, Tensor rows, Tensor ends) -> Tensor")
GROUPED_LINEAR, GROUPED_OUTER = torch.ops.meshwright.grouped_linear, torch.ops.meshwright.grouped_outer


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns [N, H]: each of `rows` [N, D] times the matrix of its group in `weight` [E, H, D].

    Group e has the rows before `ends[e]` (int32, ascending) that no group before it has. Results of rows
    behind the last group are undefined.
    """
    return _GroupedLinear.apply(rows, weight, ends)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        return GROUPED_LINEAR(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        return (
            GROUPED_LINEAR(grad, weight.mT, ends) if needs_rows else None,
            GROUPED_OUTER(grad, rows, ends) if needs_weight else None,
            None,
        )


@torch.library.impl("meshwright::grouped_linear", "CompositeExplicitAutograd")
def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _has_kernel(rows, weight.shape[1]):
        return F.grouped_mm(rows, weight.mT, offs=ends)
    result, begin = rows.new_zeros((len(rows), weight.shape[1])), 0
    for matrix, end in zip(weight.unbind(0), ends.tolist(), strict=True):
        torch.mm(rows[begin:end], matrix.t(), out=result[begin:end])
        begin = end
    return result


@torch.library.register_fake("meshwright::grouped_linear")
def _fake_grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@torch.library.impl("meshwright::grouped_outer", "CompositeExplicitAutograd")
def _grouped_outer(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Returns [E, H, D]: for each group the sum over its rows of `grad` [N, H] times `rows` [N, D]."""
    if _has_kernel(rows, grad.shape[1]):
        return F.grouped_mm(grad.mT, rows, offs=ends)
    result, begin = rows.new_empty((len(ends), grad.shape[1], rows.shape[1])), 0
    for matrix, end in zip(result.unbind(0), ends.tolist(), strict=True):
        torch.mm(grad[begin:end].t(), rows[begin:end], out=matrix)
        begin = end
    return result


@torch.library.register_fake("meshwright::grouped_outer")
def _fake_grouped_outer(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((ends.shape[0], grad.shape[1], rows.shape[1]))


def _has_kernel(rows: torch.Tensor, out_width: int) -> bool:
    """Returns whether torch's grouped product takes contiguous operands of this dtype and these widths."""
    widths = rows.shape[1], out_width
    aligned = all(width * rows.itemsize % KERNEL_ALIGNMENT == 0 for width in widths)
    return rows.dtype in GROUPED_DTYPES and aligned and len(rows) > 0 and rows.is_contiguous()
