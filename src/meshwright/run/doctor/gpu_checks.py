"""Checks the GPUs of this host that torch sees, and NCCL."""

from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.run.doctor.host_checks import Finding


def gpu_findings() -> Iterator[Finding]:
    """Checks the GPUs that torch sees, and NCCL."""
    if not torch.cuda.is_available():
        if Path("/dev/nvidia0").exists():
            text = f"there is a GPU, and torch {torch.__version__} cannot use it"
            yield Finding(
                "GPUs",
                "warning",
                text,
                "install a CUDA build of torch that fits the driver (nvidia-smi shows it)",
            )
        else:
            yield Finding("GPUs", "ok", "none; ranks train on the CPU, over gloo")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory = [torch.cuda.get_device_properties(index).total_memory / 2**30 for index in range(len(names))]
    shown = ", ".join(f"{name} {size:.0f} GiB" for name, size in zip(names, memory, strict=True))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield Finding("GPUs", "ok", f"{shown}; CUDA {torch.version.cuda}, NCCL {nccl}")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        text = (
            'matrix products are fastest with precision.compute = "bfloat16"; float32, the default, is about '
        )
        text += "ten times slower, with precision.tf32 = true about two times"
        yield Finding("precision", "ok", text)
