"""Checks the GPUs of this host that torch sees, their library, and the variables that both read."""

from collections.abc import Iterator, Mapping

import torch

from meshwright.device.device_memory import free_and_total_nbytes
from meshwright.device.local_device import (
    backend_version,
    device_name,
    has_bfloat16_products,
    local_platform,
    num_accelerators,
    unseen_platform,
)
from meshwright.device.platforms import CPU
from meshwright.run.doctor.host_checks import Finding


def gpu_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the GPUs that torch sees, and the library by which they communicate; `variables` are the
    environment.
    """
    platform = local_platform()
    if platform == CPU:
        if (unseen := unseen_platform()) is not None:
            text = f"there are devices of {unseen.name}, and torch {torch.__version__} sees none"
            fix = "install a build of torch that fits the driver (nvidia-smi shows it)"
            if unseen.visible_variables:
                fix += f"; or unset {unseen.visible_variables[0]}"
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
    yield from variable_findings(variables)


def variable_findings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what torch reads from the environment of a process on a GPU."""
    name = "PYTORCH_ALLOC_CONF"
    given = variables.get(name) or variables.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" in given:
        yield Finding("allocator", "ok", given)
    else:
        text = "without expandable_segments, batches of many lengths and pipelines fragment the memory"
        yield Finding("allocator", "warning", text, f"export {name}=expandable_segments:True")
    queues = variables.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if queues == "1":
        text = "CUDA_DEVICE_MAX_CONNECTIONS=1: kernels of all streams wait in one queue, also behind receives"
        fix = "unset it: Megatron-LM needs it for the order of its kernels, and nothing here does"
        yield Finding("streams", "warning", text, fix)
