"""The elements of a CPU tensor that a bit marks, in C (marked.h): for parallel/memory/gist_encodings.py.

Where there is no C library (another system, no compiler), or for tensors of other kinds, `can_take` says no:
then torch finds the same elements, in about ten times the time.
"""

import torch

from meshwright.comm.shared_memory.compile_library import has_library, load_library

ITEMSIZES = (2, 4, 8)


def can_take(tensor: torch.Tensor) -> bool:
    """Returns whether `take` and `put` know elements such as those of `tensor`."""
    return type(tensor) is torch.Tensor and tensor.is_cpu and tensor.itemsize in ITEMSIZES and has_library()


def take(values: torch.Tensor, bits: torch.Tensor, number: int) -> torch.Tensor:
    """Returns the `number` elements of contiguous `values` that are marked, in order.

    Bit k % 8 of byte k // 8 of `bits`, uint8, is for element k.
    """
    taken = values.new_empty(number)
    load_library().take_marked(
        values.data_ptr(), bits.data_ptr(), values.numel(), values.itemsize, taken.data_ptr()
    )
    return taken


def put(values: torch.Tensor, bits: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns [numel] elements: the marked ones are `values`, in order, and the others are 0."""
    full = values.new_empty(numel)
    load_library().put_marked(values.data_ptr(), bits.data_ptr(), numel, values.itemsize, full.data_ptr())
    return full
