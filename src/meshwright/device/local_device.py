"""The devices of this process: which one trains, its number, its name, and what it cannot do.

A process trains on the accelerator that torch was built for, if it sees one. If it sees none, it trains on
the CPU; on a host that has some only if its user has hidden them on purpose, by an empty variable.
"""

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from meshwright.device.device_memory import free_and_total_nbytes
from meshwright.device.platforms import CPU, CUDA, PLATFORMS, ROCM, XPU, Platform
from meshwright.plan.hardware.device_specs import find_device
from meshwright.plan.job.errors import Diagnostic, PlanError, format_nbytes

logger = logging.getLogger(__name__)

BUSY_WORDS = ("busy or unavailable", "exclusive process", "prohibited")  # of drivers, where a mode forbids it
FLOAT8_CAPABILITY = (8, 9)  # of CUDA, from which on torch._scaled_mm multiplies
MAX_NAMED = 64  # devices that torch names if no variable does


def is_cpu_build() -> bool:
    """Returns whether torch was built for CPUs alone."""
    return torch.accelerator.current_accelerator() is None


def local_platform() -> Platform:
    """Returns the platform of the device on which this process trains.

    Raises PlanError for an accelerator that is not supported.
    """
    if not torch.accelerator.is_available():
        return CPU
    found = torch.accelerator.current_accelerator()
    return CPU if found is None else platform_of(found)


def platform_of(device: torch.device) -> Platform:
    """Returns the platform of `device`. Raises PlanError for one that is not supported."""
    found = [platform for platform in PLATFORMS if platform.type == device.type]
    if not found:
        supported = ", ".join(platform.name for platform in PLATFORMS)
        raise PlanError(
            f"a device of type '{device.type}', which is not supported",
            fix=f"train on one of {supported}; on the CPU of this host, with a build of torch for CPUs",
            location="environment",
        )
    return ROCM if found[0] == CUDA and torch.version.hip is not None else found[0]


def target_platform(hardware: str) -> Platform:
    """Returns the platform of the devices that a plan is for: of the known accelerator `hardware`, else that
    of this process.
    """
    return local_platform() if find_device(hardware) is None else CUDA


def unseen_platform() -> Platform | None:
    """Returns the platform of devices that this host has, and of which torch sees none."""
    if torch.accelerator.is_available():
        return None
    found = (each for each in PLATFORMS if each.device_file and Path(each.device_file).exists())
    return next(found, None)


def has_triton(device: torch.device) -> bool:
    """Returns whether kernels of Triton run on `device`."""
    return device.type != CPU.type and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    return find_spec("triton") is not None


def num_accelerators() -> int:
    """Returns how many devices this process sees besides the CPU."""
    return torch.accelerator.device_count() if local_platform() != CPU else 0


def own_device() -> torch.device:
    """Returns the device of a process without peers: the current one of its accelerator, else the CPU.

    Raises PlanError where torch sees none of the devices of the host, unless they are all hidden on purpose.
    """
    platform = local_platform()
    if platform != CPU:
        return torch.device(platform.type, torch.accelerator.current_device_index())
    return _cpu()


def _cpu() -> torch.device:
    built_for, unseen = torch.accelerator.current_accelerator(), unseen_platform()
    if built_for is not None:
        platform = platform_of(built_for)
        if _is_hidden_on_purpose(platform):
            return torch.device(CPU.type)
        if platform == unseen:
            raise _unseen_devices(platform)
        hidden = f" ({platform.visible_variables[0]} may hide it)" if platform.visible_variables else ""
        logger.warning("training on the CPU: this torch is for %s and sees none%s", platform.name, hidden)
    elif unseen is not None:
        logger.warning("training on the CPU: this torch is for CPUs alone, and the host has %s", unseen.name)
    return torch.device(CPU.type)


def _is_hidden_on_purpose(platform: Platform) -> bool:
    """Returns whether the variable that chooses devices is empty, or -1."""
    return platform.type == CUDA.type and not torch.cuda._parse_visible_devices()


def _unseen_devices(platform: Platform) -> PlanError:
    named, variable = torch.cuda._parse_visible_devices(), platform.visible_variables[0]
    given = f" ({variable} names {', '.join(map(str, named))})" if len(named) < MAX_NAMED else ""
    return PlanError(
        f"this host has devices of {platform.name} ({platform.device_file}), and torch sees none{given}",
        fix=f"name devices that exist in {variable}, or unset it; install a torch that fits the driver "
        f"(meshwright doctor){hide_fix(platform)}",
        location="environment",
    )


def device_of_rank(local_rank: int, *, every_visible: bool) -> torch.device:
    """Returns the device of the rank `local_rank` of a host: the accelerator with its number, or the only one
    that is visible to it, else the CPU. With `every_visible` all ranks see the same.

    Raises PlanError when there is none for it.
    """
    platform, visible = local_platform(), num_accelerators()
    if platform == CPU:
        return _cpu()
    alone_on_it = visible == 1 and not every_visible
    if local_rank >= visible and not alone_on_it:
        text = f"rank {local_rank} of this host needs a GPU of its own, and {visible} are visible"
        fix = f"start at most {visible} ranks per host{hide_fix(platform)}"
        raise PlanError(text, fix=fix, location="environment")
    return torch.device(platform.type, 0 if alone_on_it else local_rank)


def hide_fix(platform: Platform) -> str:
    """Returns how to train on the CPU of a host with devices of `platform`, as the end of a repair; "" if no
    variable hides them.
    """
    if not platform.visible_variables:
        return ""
    return f"; or {platform.visible_variables[0]}= (empty) to train on the CPU"


def use_device(device: torch.device) -> None:
    """Makes `device` the current one of this process; the CPU needs nothing.

    Raises PlanError if another process has it and it serves one alone, or if its driver refuses it.
    """
    if device.type == CPU.type:
        return
    try:
        torch.accelerator.set_device_index(device)
        free, total = free_and_total_nbytes(device)  # the first call that needs the device itself
    except RuntimeError as error:
        raise _unusable(device, str(error).partition("\n")[0]) from error
    if free < total // 2:
        logger.warning(
            "%s: %s of %s are free, other processes have the rest",
            device,
            format_nbytes(free),
            format_nbytes(total),
        )


def _unusable(device: torch.device, reason: str) -> PlanError:
    if any(word in reason for word in BUSY_WORDS):
        return PlanError(
            f"another process has {device}, and its compute mode allows one at a time: {reason}",
            fix="end that process (nvidia-smi shows it), or allow several: nvidia-smi -c DEFAULT",
            location="environment",
        )
    if "out of memory" in reason:
        return PlanError(
            f"{device} has no memory left for this process: {reason}",
            fix="end the processes that have it (nvidia-smi shows them), or choose another device",
            location="environment",
        )
    return PlanError(
        f"{device} cannot be used: {reason}",
        fix=f"see whether its driver fits this torch: meshwright doctor{hide_fix(platform_of(device))}",
        location="environment",
    )


def device_diagnostics(platform: Platform, num_ranks: int, dtypes: Iterable[str]) -> Iterator[Diagnostic]:
    """Yields what `platform` cannot do: communicate among `num_ranks` ranks, compute in `dtypes`."""
    if platform.backend is None and num_ranks > 1:
        yield Diagnostic(
            f"{num_ranks} ranks on {platform.name}, and torch.distributed has no backend for it",
            "train with one rank, or on a host with other devices",
            "mesh",
        )
    if "float64" in dtypes and not platform.has_float64:
        yield Diagnostic(
            f"float64 on {platform.name}, which does not have it", 'write "float32"', "precision"
        )


def own_device_diagnostics(num_ranks: int) -> Iterator[Diagnostic]:
    """Yields that this host has no device for each of its `num_ranks` ranks; CPUs are shared."""
    platform, visible = local_platform(), num_accelerators()
    if platform != CPU and num_ranks > visible:
        text = f"{num_ranks} ranks of this host need a GPU of their own each, and {visible} are visible"
        yield Diagnostic(text, f"start at most {visible}{hide_fix(platform)}", "environment")


def device_name(device: torch.device) -> str:
    """Returns the driver's name of `device`; its type where torch knows no name."""
    names = vars(torch.get_device_module(device)).get("get_device_name") if device.type != CPU.type else None
    return device.type if names is None else names(device)


def backend_version(platform: Platform) -> str:
    """Returns the versions of `platform` and of the library by which its devices communicate."""
    versions = vars(torch.version)
    number = versions.get("hip") or versions.get(platform.type) or "of unknown version"
    if platform.backend is None:
        return f"{platform.name} {number}"
    if platform.type != CUDA.type:
        return f"{platform.name} {number}, {platform.library}"
    return f"{platform.name} {number}, {platform.library} {'.'.join(map(str, torch.cuda.nccl.version()))}"


def has_bfloat16_products() -> bool:
    """Returns whether the accelerator that this process sees, if any, has units for products in bfloat16."""
    platform = local_platform()
    if platform.type == CUDA.type:
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return platform == XPU


def float8_fault() -> str:
    """Returns why the accelerator that this process sees has no products in float8; "" if it has, or if there
    is none.
    """
    platform = local_platform()
    if platform == CPU:
        return ""
    if platform != CUDA:
        return f"float8 on {platform.name}, where it was not tried"
    device = own_device()
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= FLOAT8_CAPABILITY:
        return ""
    needed = ".".join(map(str, FLOAT8_CAPABILITY))
    return f"{device_name(device)} has compute capability {major}.{minor}, and float8 begins with {needed}"


def fused_attention_capability(device: torch.device) -> tuple[int, int] | None:
    """Returns the compute capability of `device`, such as (9, 0), if ATen has attention kernels for it that
    return the log-sum-exp; else None.
    """
    if device.type != CUDA.type or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def takes_cudnn_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether the attention of cuDNN takes these tensors, without mask; heads may be grouped."""
    given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, True)
    return torch.backends.cuda.can_use_cudnn_attention(given)
