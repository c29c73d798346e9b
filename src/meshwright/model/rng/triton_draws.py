"""Triton kernels of the stateless draws: one launch for a mask of all samples, with the bits of a CPU.

One program computes BLOCK elements. Each finds its sample and its logical index, hashes the key of the draw
with the sample, and that with the index; arithmetic is in unsigned 64 bits and wraps. Nothing but the result
is written: a mask costs one byte of memory traffic per element.

Only imported where Triton is installed and the tensors are on a GPU. `TRITON_INTERPRET=1` runs the same code
on a CPU, which is how the tests compare its bits.
"""

import torch
import triton  # type: ignore[missing-import]  it comes with builds of torch for GPUs
import triton.language as tl  # type: ignore[missing-import]

from meshwright.model.tensors.counter_rng import GOLDEN_GAMMA

BLOCK = 1024  # elements of one program
GAMMA = tl.constexpr(GOLDEN_GAMMA)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _splitmix(key, index):
    z = key + (index + 1) * GAMMA
    z = (z ^ (z >> 30)) * MULTIPLIER_1
    z = (z ^ (z >> 27)) * MULTIPLIER_2
    return z ^ (z >> 31)


@triton.jit
def _top53(samples, index, key, first, width, offsets, inside, HAS_INDEX: tl.constexpr):
    element = offsets % width
    if HAS_INDEX:
        logical = tl.load(index + element, mask=inside, other=0)
    else:
        logical = element + first
    sample = tl.load(samples + offsets // width, mask=inside, other=0)
    # a small key would be 32 bits wide
    wide_key = tl.zeros_like(sample) + key
    sample_key = _splitmix(
        tl.cast(wide_key, tl.uint64, bitcast=True), tl.cast(sample, tl.uint64, bitcast=True)
    )
    return _splitmix(sample_key, tl.cast(logical, tl.uint64, bitcast=True)) >> 11


# another key must not compile another kernel
@triton.jit(do_not_specialize=("key", "first", "threshold"))
def _keep_mask_kernel(
    out, samples, index, key, first, width, numel, threshold, HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    bits = _top53(samples, index, key, first, width, offsets, inside, HAS_INDEX)
    tl.store(out + offsets, bits.to(tl.int64) >= threshold, mask=inside)


@triton.jit(do_not_specialize=("key", "first"))
def _uniform_kernel(
    out,
    samples,
    index,
    key,
    first,
    width,
    numel,
    DIGITS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    bits = _top53(samples, index, key, first, width, offsets, inside, HAS_INDEX)
    digits = (bits >> (53 - DIGITS)).to(tl.int64)
    # at most 24 digits are exact in float32, and all 53 in float64
    if DIGITS == 53:
        numbers = digits.to(tl.float64) * (1.0 / (1 << 53))
    else:
        numbers = digits.to(tl.float32) * (1.0 / (1 << DIGITS))
    tl.store(out + offsets, numbers.to(out.dtype.element_ty), mask=inside)


def fill_keep_mask(
    mask: torch.Tensor,
    samples: torch.Tensor,
    key: int,
    first: int,
    index: torch.Tensor | None,
    threshold: int,
) -> None:
    """Fills `mask` [len(samples), width] in one launch; see `draw_ops.keep_mask`."""
    _launch(_keep_mask_kernel, mask.view(torch.uint8), samples, key, first, index, threshold)


def fill_uniform(
    numbers: torch.Tensor,
    samples: torch.Tensor,
    key: int,
    first: int,
    index: torch.Tensor | None,
    digits: int,
) -> None:
    """Fills `numbers` [len(samples), width] in one launch; see `draw_ops.uniform`."""
    _launch(_uniform_kernel, numbers, samples, key, first, index, digits)


def _launch(kernel, out, samples, key, first, index, last) -> None:
    numel, width = out.numel(), out.shape[1]
    if not numel:
        return
    operands = (out, samples, samples if index is None else index)
    # a kernel starts on the current device
    with torch.accelerator.device_index(out.device.index):
        kernel[(triton.cdiv(numel, BLOCK),)](
            *operands, key, first, width, numel, last, index is not None, BLOCK
        )
