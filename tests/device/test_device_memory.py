"""Memory of devices that are faked, and of this process on the CPU."""

import psutil
import pytest
import torch

from meshwright.device.device_memory import (
    AllocatorStatistics,
    allocator_statistics,
    free_and_total_nbytes,
    memory_limit,
    peak_memory,
    process_nbytes,
)
from tests.device.fake_accelerator import GIB, fake_accelerator

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


def test_the_memory_of_a_gpu_is_that_of_its_allocator(monkeypatch: pytest.MonkeyPatch):
    fake_accelerator(monkeypatch, memory_info=lambda device: (3 * GIB, 80 * GIB))
    found = {"allocated_bytes.all.current": 10, "allocated_bytes.all.peak": 20}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: found if device == GPU else {})
    assert free_and_total_nbytes(GPU) == (3 * GIB, 80 * GIB)
    assert (memory_limit(GPU), process_nbytes(GPU), peak_memory(GPU)) == (80 * GIB, 10, 20)


def test_statistics_are_read_by_their_names_in_torch(monkeypatch: pytest.MonkeyPatch):
    found = {"allocated_bytes.all.peak": 1, "reserved_bytes.all.peak": 2, "num_alloc_retries": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: found)
    assert allocator_statistics(GPU) == AllocatorStatistics(1, 2, 3)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    assert allocator_statistics(GPU) is None
    assert allocator_statistics(CPU) is None


def test_the_memory_of_the_cpu_is_that_of_the_host_and_of_this_process():
    assert free_and_total_nbytes(CPU)[1] == psutil.virtual_memory().total
    assert 0 < process_nbytes(CPU) < 1.1 * peak_memory(CPU)  # the kernel counts both with some delay


def test_the_memory_of_mps_is_what_the_host_lends_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 3)
    device = torch.device("mps")
    assert (free_and_total_nbytes(device), process_nbytes(device), peak_memory(device)) == ((6, 10), 3, 3)
