"""Codes of one byte in C: float32 values of a CPU, one pass while a block is in cache (codes.h).

Where there is no C library (another system, no compiler), or for tensors of other kinds, `can_code` says no:
then torch computes the same bits, in about six times the time.
"""

import torch

from meshwright.comm.shared_memory.compile_library import has_library, load_library


def can_code(values: torch.Tensor) -> bool:
    """Returns whether `encode` and `decode` take `values`."""
    return type(values) is torch.Tensor and values.is_cpu and values.dtype == torch.float32 and has_library()


def encode(values: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes the codes of flat `values` and leaves in them what the codes lose.

    `scales` are the bytes of a float32 per 256 values, `codes` a byte per value, both uint8 and contiguous.
    """
    load_library().int8_encode(values.data_ptr(), values.numel(), scales.data_ptr(), codes.data_ptr())


def decode(scales: torch.Tensor, codes: torch.Tensor, values: torch.Tensor, *, add: bool) -> None:
    """Writes the values of `codes` into `values`, or adds them to what it holds."""
    load_library().int8_decode(
        scales.data_ptr(), codes.data_ptr(), values.numel(), values.data_ptr(), int(add)
    )
