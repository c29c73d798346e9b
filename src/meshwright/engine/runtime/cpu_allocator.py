"""The heap of a CPU rank: memory that a step frees stays with the process, for the next step.

glibc returns free memory at the end of its heap to the kernel at once, and takes it again page by page, each
page filled with zeros first. Whether a large tensor lies at that end is luck, and an unlucky step does it
with all its activations: measured, 25 M Llama, 1,024 tokens per rank: 35,000 to 58,000 page faults per step,
and 13 % of its CPU.

    step      allocate activations ... free them heap [ weights | activations ]  ->  [ weights |    free     ]
    kernel    (nothing)                                                               kept for the next step

The setting holds for the whole process, as glibc's own MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_
would. Memory left over from building the model and from the first steps is returned once, so that the process
is as large as its steps.
Limits: tensors above 32 MiB always come from the kernel and return to it. Other C libraries are left as they
are.
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_MMAP_THRESHOLD = 32 * 2**20  # the largest that glibc takes
NEVER_TRIM = -1


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
