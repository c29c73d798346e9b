"""The heap of the process does not shrink, so that later steps take no page from the kernel."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from meshwright.engine.runtime.cpu_allocator import (
    HUGE_PAGE_NBYTES,
    M_MMAP_THRESHOLD,
    MAX_MMAP_THRESHOLD,
    retain_heap,
    use_huge_pages,
)

STEPS = """
    import ctypes, json, resource, sys
    from meshwright.engine.runtime.cpu_allocator import M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD
    from meshwright.engine.runtime.cpu_allocator import retain_heap, trim_heap

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    if sys.argv[1] == "keep":
        kept = retain_heap()
    else:
        kept = bool(libc.mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD))

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [libc.malloc(2**22) for _ in range(16)]
        for each in held:
            ctypes.memset(each, 1, 2**22)
        for each in held:
            libc.free(each)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = faults()
    print(json.dumps([kept, [faults() for _ in range(5)]]))
"""


def faults(how: str, program: str = STEPS) -> list[int]:
    """Page faults of five steps that take 64 MiB, in a process of its own: what is set holds for the whole
    process.
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(program), how], capture_output=True, text=True, check=True, timeout=100
    )
    able, counts = json.loads(done.stdout)
    if not able:
        pytest.skip("needs glibc: other C libraries are left as they are")
    return counts


def test_later_steps_take_no_pages():
    assert max(faults("keep")) < 64


def test_without_it_they_do():
    assert min(faults("leave")) > 8000  # 64 MiB are 16 384 pages of 4 KiB


def test_free_memory_is_returned_once():
    counts = faults("keep", STEPS.replace("first = faults()", "first = faults(); trim_heap()"))
    assert counts[0] > 8000
    assert max(counts[1:]) < 64


def test_a_second_call_does_nothing_more():
    assert retain_heap() == retain_heap()
    assert (M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD) == (
        -3,
        32 * 2**20,
    )  # malloc.h's number, and the most that mallopt takes


def test_large_tensors_move_to_huge_pages_where_they_are():
    large, small = torch.randn(4 * HUGE_PAGE_NBYTES), torch.randn(10)
    before, place = large.clone(), large.data_ptr()
    moved = use_huge_pages([small, torch.empty(0), large, torch.zeros(9, device="meta")])
    if not moved:
        pytest.skip("the kernel moves no pages at once")
    assert moved in (15 * HUGE_PAGE_NBYTES, 16 * HUGE_PAGE_NBYTES)  # it may begin within one
    assert huge_nbytes(place + HUGE_PAGE_NBYTES) >= moved
    assert torch.equal(large, before)


def huge_nbytes(address: int) -> int:
    """Bytes in huge pages of the mapping of this process that holds `address`."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    return 0
