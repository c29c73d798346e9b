"""Checks the GPUs of this host that torch sees, and the library by which they communicate."""

from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.device.device_memory import free_and_total_nbytes
from meshwright.device.local_device import (
    backend_version,
    device_name,
    has_bfloat16_products,
    local_platform,
    num_accelerators,
)
from meshwright.device.platforms import CPU
from meshwright.run.doctor.host_checks import Finding


def gpu_findings() -> Iterator[Finding]:
    """Checks the GPUs that torch sees, and the library by which they communicate."""
    platform = local_platform()
    if platform == CPU:
        if Path("/dev/nvidia0").exists():
            text = f"there is a GPU, and torch {torch.__version__} cannot use it"
            fix = "install a build of torch that fits the driver (nvidia-smi shows it)"
            yield Finding("GPUs", "warning", text, fix)
        else:
            yield Finding("GPUs", "ok", "none; ranks train on the CPU, over gloo")
        return
    devices = [torch.device(platform.type, index) for index in range(num_accelerators())]
    shown = ", ".join(
        f"{device_name(each)} {free_and_total_nbytes(each)[1] / 2**30:.0f} GiB" for each in devices
    )
    yield Finding("GPUs", "ok", f"{shown}; {backend_version(platform)}")
    if has_bfloat16_products():
        text = (
            'matrix products are fastest with precision.compute = "bfloat16"; float32, the default, is about '
        )
        text += "ten times slower, with precision.tf32 = true about two times"
        yield Finding("precision", "ok", text)
