"""The machine, and the tests that need a GPU."""

import subprocess
import sys
from shutil import which

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.harness.result import ROOT, machine, versions
from meshwright.device.device_memory import free_and_total_nbytes
from meshwright.device.local_device import backend_version, device_name, platform_of

QUERY = "name,driver_version,compute_mode,power.limit,clocks.max.sm,memory.total,memory.used"
GPU_TESTS = (
    "tests/comm/backends/test_process_group_gpu.py",
    "tests/parallel/context/test_attention_kernel_gpu.py",
    "tests/run/doctor/test_gpu_checks.py",
    "tests/model/rng/test_triton_draws.py",
    "tests/parallel/context/output_merge/test_triton_merge.py",
)
TESTS_LIMIT_S = 50  # less than that of the section, which would leave no word of them


def environment(setting: Setting) -> dict[str, object]:
    """Returns what the machine is, and how the tests that need a GPU end."""
    device = setting.device
    free, total = free_and_total_nbytes(device)
    tests = setting.size(GPU_TESTS, GPU_TESTS[2:3])
    options = ["-q", "--gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", "-o", "addopts="]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    found = {
        "machine": machine(),
        "versions": versions(),
        "device": device_name(device),
        "libraries": backend_version(platform_of(device)),
        "free_bytes": free,
        "total_bytes": total,
        "driver": _driver(),
        "cudnn": torch.backends.cudnn.version(),
    }
    setting.keep(found)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_LIMIT_S)
    return {"ok": run.returncode == 0, **found, "tests": run.stdout.strip().splitlines()[-30:]}


def _driver() -> str:
    if which("nvidia-smi") is None:
        return "there is no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
