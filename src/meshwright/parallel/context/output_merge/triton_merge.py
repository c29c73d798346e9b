"""A Triton kernel that merges the attention of two sets of keys in one launch; see merge_outputs.py.

One program merges BLOCK rows of one head. Strides of all dims are given, so views of the rows of a block are
merged where they lie.

Only imported where Triton is installed and the tensors are on a GPU. `TRITON_INTERPRET=1` runs the same code
on a CPU, which is how the test compares its numbers.
"""

import torch
import triton  # type: ignore[missing-import]  it comes with builds of torch for GPUs
import triton.language as tl  # type: ignore[missing-import]

ELEMENTS = 4096  # of an output that one program merges, at most


@triton.jit
def _merge_kernel(
    out,
    lse,
    other_out,
    other_lse,
    heads,
    rows,
    width,
    out_b,
    out_h,
    out_n,
    out_e,
    lse_b,
    lse_h,
    lse_n,
    other_b,
    other_h,
    other_n,
    other_e,
    other_lse_b,
    other_lse_h,
    other_lse_n,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1).to(tl.int64) % heads
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDTH)
    inside = row < rows
    within = inside[:, None] & (column < width)[None, :]

    place = lse + batch * lse_b + head * lse_h + row * lse_n
    mine = tl.load(place, mask=inside, other=0.0)
    more = tl.load(
        other_lse + batch * other_lse_b + head * other_lse_h + row * other_lse_n, mask=inside, other=0.0
    ).to(mine.dtype)
    difference = more - mine
    weight = 1.0 / (1.0 + tl.exp(-difference))
    weight = tl.where(difference != difference, 0.0, weight)  # of nothing and nothing: nothing
    largest = tl.maximum(mine, more)
    total = largest + tl.log(1.0 + tl.exp(-tl.abs(difference)))
    tl.store(place, tl.where(largest == float("-inf"), largest, total), mask=inside)

    places = out + batch * out_b + head * out_h + row[:, None] * out_n + column[None, :] * out_e
    others = other_out + batch * other_b + head * other_h + row[:, None] * other_n + column[None, :] * other_e
    first = tl.load(places, mask=within, other=0.0)
    second = tl.load(others, mask=within, other=0.0).to(first.dtype)
    share = weight[:, None]
    step = second - first
    # as torch.lerp: exact at both ends
    merged = tl.where(share < 0.5, first + share * step, second - step * (1.0 - share))
    tl.store(places, merged.to(first.dtype), mask=within)


def merge_in_one_kernel(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merges `other_out` and `other_lse` into `out` [B, H, n, e] and `lse` [B, H, n], in place."""
    if not out.numel():
        return
    batch, heads, rows, width = out.shape
    columns = triton.next_power_of_2(width)
    block = max(1, ELEMENTS // columns)
    strides = (*out.stride(), *lse.stride(), *other_out.stride(), *other_lse.stride())
    # a kernel starts on the current device
    with torch.accelerator.device_index(out.device.index):
        _merge_kernel[(triton.cdiv(rows, block), batch * heads)](
            out, lse, other_out, other_lse, heads, rows, width, *strides, BLOCK=block, WIDTH=columns
        )
