"""The heap of a CPU rank: what a step frees stays with the process, for the next step to take again.

glibc gives memory at the end of its heap back to the kernel as soon as it is free, and takes it anew, page by page, each page
filled with zeros first. Whether a large tensor lies at that end is luck, and a step whose luck is bad does it with all its
activations: measured, 25 M Llama, 1,024 tokens per rank: 35,000 to 58,000 page faults per step, and 13 % of its CPU.

    step      take activations ... free them          heap  [ weights | activations ]  ->  [ weights |     free     ]
    kernel    (nothing)                                                                     stays, for the next step

It holds for the whole process, as GLIBC's own MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ would. What building the model
and the first steps have left is given back once, so that the process is as large as its steps are.
Limits: tensors above 32 MiB always come from the kernel and go back to it. Other C libraries are left as they are.
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MAX_MMAP_THRESHOLD = 32 * 2**20  # the largest that glibc takes
NEVER_TRIM = -1


def trim_heap() -> None:
    """Give all free memory of the heap to the kernel, this once."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def retain_heap() -> bool:
    """Have freed memory stay with this process; False where the C library is not glibc. A second call does nothing more."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # both: one of them alone would end glibc's own adjusting of the other
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)) and bool(mallopt(M_TRIM_THRESHOLD, NEVER_TRIM))
