"""The elements of a CPU tensor that a bit marks, in C (marked.h): for parallel/memory/gist_encodings.py.

Bit k % 8 of byte k // 8 is for element k: bits are uint8 [ceil(numel / 8)]. Where there is no C library
(another system, no compiler), or for tensors of other kinds, `can_mark` says no: then torch finds the same
elements, in about ten times the time.
"""

import torch

from meshwright.comm.shared_memory.compile_library import has_library, load_library

_BITS = {  # of infinity and of 1
    torch.float16: (0x7C00, 0x3C00),
    torch.bfloat16: (0x7F80, 0x3F80),
    torch.float32: (0x7F800000, 0x3F800000),
    torch.float64: (0x7FF0000000000000, 0x3FF0000000000000),
}


def can_mark(tensor: torch.Tensor) -> bool:
    """Returns whether the functions below know tensors like this one."""
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in _BITS and has_library()


def mark_positive(values: torch.Tensor) -> torch.Tensor:
    """Returns the bits of what of contiguous `values` is not <= 0: what is above, or no number."""
    return _mark(values, _BITS[values.dtype][0])[0]


def mark_nonzero(values: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the bits of what of contiguous `values` is anything but +0, and how many are."""
    return _mark(values, 0)


def take_marked(values: torch.Tensor, bits: torch.Tensor, number: int) -> torch.Tensor:
    """Returns the `number` elements of contiguous `values` that are marked, in order."""
    taken = values.new_empty(number)
    load_library().take_marked(
        values.data_ptr(), bits.data_ptr(), values.numel(), values.itemsize, taken.data_ptr()
    )
    return taken


def put_marked(values: torch.Tensor, bits: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns [numel] elements: the marked ones are `values`, in order, and the others are 0."""
    full = values.new_empty(numel)
    load_library().put_marked(values.data_ptr(), 0, bits.data_ptr(), numel, values.itemsize, full.data_ptr())
    return full


def put_ones(bits: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns [numel] elements: 1 where one is marked, and 0."""
    full = torch.empty(numel, dtype=dtype)
    load_library().put_marked(None, _BITS[dtype][1], bits.data_ptr(), numel, dtype.itemsize, full.data_ptr())
    return full


def _mark(values: torch.Tensor, infinity: int) -> tuple[torch.Tensor, int]:
    bits = torch.empty(-(-values.numel() // 8), dtype=torch.uint8)
    number = load_library().mark_elements(
        values.data_ptr(), values.numel(), values.itemsize, infinity, bits.data_ptr()
    )
    return bits, number
