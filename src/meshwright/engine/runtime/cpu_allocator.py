"""The memory of a CPU rank: what a step frees stays with the process, what stays lies in huge pages.

glibc returns free memory at the end of its heap to the kernel at once, and takes it again page by page, each
page filled with zeros first. Whether a large tensor lies at that end is luck, and an unlucky step does it
with all its activations: measured, 25 M Llama, 1,024 tokens per rank: 35,000 to 58,000 page faults per step,
and 13 % of its CPU.

    step      allocate activations ... free them heap [ weights | activations ]  ->  [ weights |    free     ]
    kernel    (nothing)                                                               kept for the next step

The setting holds for the whole process, as glibc's own MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_
would. Memory left over from building the model and from the first steps is returned once, so that the process
is as large as its steps.
What an optimizer reads and writes in every step (weights, gradients, states) is moved once, after the first
steps, into pages of 2 MiB, of which the processor finds 512 times fewer: AdamW over 25.6 M elements took 0.88
of its time. The kernel collapses the pages where they lie, 2 MiB at a time, so no memory is held twice.

Limits: tensors above 32 MiB always come from the kernel and return to it. Other C libraries are left as they
are. Kernels before 6.1 collapse pages in the background, and only what is marked in time.
"""

import ctypes
import mmap
import platform
import sys
from collections.abc import Iterable

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_MMAP_THRESHOLD = 32 * 2**20  # the largest that glibc takes
NEVER_TRIM = -1
HUGE_PAGE_NBYTES = 2 * 2**20
MADV_COLLAPSE = 25  # asm-generic/mman-common.h; not in Python 3.13's mmap


def trim_heap() -> None:
    """Returns all free memory of the heap to the kernel, once."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def retain_heap() -> bool:
    """Keeps freed memory with this process; returns False where the C library is not glibc. Idempotent."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # both: one of them alone would end glibc's own adjusting of the other
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM))


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Moves the memory of host tensors into pages of 2 MiB, as far as it covers whole ones; their values, and
    where they lie, stay. Returns the bytes that it has moved; 0 where the kernel cannot, or will later.
    """
    if sys.platform != "linux":
        return 0
    found = (each.untyped_storage() for each in tensors)  # that of a fake tensor is on no device
    storages, moved = {each.data_ptr(): each for each in found if each.device.type == "cpu"}, 0
    for start, storage in storages.items():  # many parameters are views of one
        begin = -(-start // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        nbytes = (start + storage.nbytes() - begin) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        if nbytes > 0:
            advise_kernel(begin, nbytes, mmap.MADV_HUGEPAGE)
            moved += 0 if advise_kernel(begin, nbytes, MADV_COLLAPSE) else nbytes
    return moved


def advise_kernel(begin: int, nbytes: int, advice: int) -> int:
    """Calls madvise for `nbytes` from the address `begin`; returns its error number, 0 if there is none."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    failed = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0
