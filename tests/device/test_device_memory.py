"""Memory of devices that are faked, and of this process on the CPU."""

from pathlib import Path

import psutil
import pytest
import torch

from meshwright.device.device_memory import (
    AllocatorStatistics,
    allocator_statistics,
    free_and_total_host_nbytes,
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


CGROUPS = {
    "version 1": (
        "5:memory:/job",
        "sys/fs/cgroup/memory/job",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ),
    "version 2": ("0::/job", "sys/fs/cgroup/job", ("memory.max", "memory.current")),
    "a mount of a container": ("0::/of/its/host", "sys/fs/cgroup", ("memory.max", "memory.current")),
    "the parent": ("0::/job/inner", "sys/fs/cgroup/job", ("memory.max", "memory.current")),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_a_cgroup_bounds_what_this_process_may_take(name: str, tmp_path: Path):
    entry, folder, names = CGROUPS[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/\n{entry}\n")
    (tmp_path / "sys/fs/cgroup/job/inner").mkdir(parents=True)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for file, nbytes in zip(names, (1_000, 700), strict=True):
        (tmp_path / folder / file).write_text(f"{nbytes}\n")
    (tmp_path / folder / "memory.stat").write_text("cache 60\ninactive_file 50\ntotal_inactive_file 50\n")
    assert free_and_total_host_nbytes(tmp_path) == (350, 1_000)
    (tmp_path / folder / names[0]).write_text("max\n")
    assert free_and_total_host_nbytes(tmp_path)[1] == psutil.virtual_memory().total
