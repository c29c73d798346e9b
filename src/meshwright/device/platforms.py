"""The table of the platforms that a device may belong to, without torch.

    platform   type in torch   backend of torch.distributed   ranks
    CPU        cpu             gloo, or shared memory         any number on a host
    CUDA       cuda            nccl (NCCL)                    one per GPU
    ROCm       cuda            nccl (RCCL)                    one per GPU
    XPU        xpu             xccl (oneCCL)                  one per GPU
    MPS        mps             none                           one

Limits: the lines of ROCm, XPU and MPS follow the documents of torch 2.13; nothing has run there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Platform:
    """Devices of one make: their `type` in torch, and the `backend` of torch.distributed for them, by which
    name torch calls a `library`; None: their ranks cannot communicate.

    `visible_variables` choose the devices that a process sees; the first hides all if it is empty.
    A host has `device_file` if it has such devices and their driver ("": no file tells).
    `blocking_variables` make the host wait for each kernel, `interface_variable` names the network interface
    of the backend, and `sum_variables` make it add in the same order each time. With `can_split` a
    communicator can be split; with `can_pin_memory` copies from the host can be asynchronous. Kernels and
    backend are fastest where tensors begin at multiples of `align_bytes`.
    """

    name: str
    type: str
    backend: str | None
    library: str
    device_file: str = ""
    visible_variables: tuple[str, ...] = ()
    blocking_variables: tuple[str, ...] = ()
    interface_variable: str = ""
    sum_variables: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    can_split: bool = False
    can_pin_memory: bool = True
    has_float64: bool = True
    align_bytes: int = 128


CPU = Platform(
    "CPU", "cpu", "gloo", "gloo", interface_variable="GLOO_SOCKET_IFNAME", can_pin_memory=False, align_bytes=1
)
CUDA = Platform(
    "CUDA",
    "cuda",
    "nccl",
    "NCCL",
    "/dev/nvidia0",
    visible_variables=("CUDA_VISIBLE_DEVICES",),
    blocking_variables=("CUDA_LAUNCH_BLOCKING",),
    interface_variable="NCCL_SOCKET_IFNAME",
    sum_variables=MappingProxyType({"NCCL_ALGO": "Ring"}),
    can_split=True,
)
ROCM = Platform(
    "ROCm",
    "cuda",
    "nccl",
    "RCCL",
    "/dev/kfd",
    visible_variables=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    blocking_variables=("HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL", "CUDA_LAUNCH_BLOCKING"),
    interface_variable="NCCL_SOCKET_IFNAME",
    sum_variables=MappingProxyType({"NCCL_ALGO": "Ring"}),
    can_split=True,
)
XPU = Platform(
    "XPU",
    "xpu",
    "xccl",
    "oneCCL",
    visible_variables=("ZE_AFFINITY_MASK",),
    blocking_variables=("ZE_SERIALIZE",),
    interface_variable="CCL_KVS_IFACE",
)
MPS = Platform("MPS", "mps", None, "", has_float64=False, can_pin_memory=False)

PLATFORMS = (CPU, CUDA, ROCM, XPU, MPS)
DEVICE_TYPES = tuple(dict.fromkeys(each.type for each in PLATFORMS))
ACCELERATOR_BACKENDS = tuple(dict.fromkeys(each.backend for each in PLATFORMS[1:] if each.backend))
