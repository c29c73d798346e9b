"""A CUDA device that has no values: what a process asks of it is run on fake tensors, and counted.

While `FakeDevice` is active (`with`), tensors of the CPU are real, as in a process with a GPU, and tensors on
"cuda" are fake: shapes, dtypes and devices are checked, and nothing is computed.

    kernels      operators on tensors of the device, but for views and allocations
    host_reads   `.item()`, `.tolist()` and blocking copies to the CPU: the host waits for the device
    copies       all other copies between the CPU and the device

A number that is read is `number`, a truth value False; a copy to the CPU holds ones. A forward whose shapes
depend on values cannot run, as under any fake tensor. Needs the guard of `benchmarks.harness.cuda_guard`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.analysis.live_memory_tracker import empty_grouped_product

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
VIEWS = {aten._unsafe_view, aten._reshape_alias, aten.resize_, aten.set_}  # that torch does not call so
NO_KERNELS = frozenset(ALLOCATIONS | VIEWS | {aten.record_stream})
WITHOUT_FAKE_KERNEL = (aten.record_stream, aten._fused_sgd_)  # they return nothing
READS = (aten._local_scalar_dense, aten.equal)


def pretend_cuda() -> None:
    """Makes torch, a CPU build, believe that its CUDA is initialized and knows autocast."""
    torch.cuda._lazy_init = lambda: None
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    FakeTensor.tolist = lambda self: self.to("cpu").tolist()  # one read, as of a real tensor
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a copy that modes see


@dataclass
class OperationCounts:
    """What was asked of a device."""

    kernels: int = 0
    host_reads: int = 0
    copies: int = 0


class FakeDevice(TorchDispatchMode):
    """Runs operators of the device on fake tensors, and counts them in `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = OperationCounts()
        self.number = 1  # what `.item()` returns
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default and self._is_on_device(args[0]):
            return args[0].fake_device  # asked more often than all else together
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        uses_device = any(map(self._is_on_device, leaves))
        if not uses_device and kwargs.get("device") != DEVICE:
            return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        packet = func.overloadpacket
        to_host = uses_device and _copies_to_host(func, args, kwargs)
        if packet in READS or (to_host and not _is_non_blocking(func, args, kwargs)):
            self.counts.host_reads += 1
        elif to_host or (packet in (aten._to_copy, aten.copy_) and any(map(_is_on_host, leaves))):
            self.counts.copies += 1
        elif _launches_kernel(func):
            self.counts.kernels += 1
        if packet in READS or to_host:
            return self._read(packet, args[0], kwargs)
        if packet in WITHOUT_FAKE_KERNEL:
            return None
        with self.fake_mode:  # that of a grouped product takes bfloat16 alone
            return (empty_grouped_product if packet is aten._grouped_mm else func)(*args, **kwargs)

    def _read(self, packet: Any, tensor: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Returns what the host reads."""
        if packet is aten.equal:
            return True
        if packet is aten._local_scalar_dense:
            return tensor.dtype != torch.bool and torch.tensor(self.number, dtype=tensor.dtype).tolist()
        if packet is aten.copy_:
            return tensor.fill_(1)
        return torch.ones(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)

    def _is_on_device(self, leaf: object) -> bool:
        return isinstance(leaf, FakeTensor) and leaf.fake_mode is self.fake_mode


def _launches_kernel(func: Any) -> bool:
    return not func.is_view and func.overloadpacket not in NO_KERNELS


def _is_on_host(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"


def _is_non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a copy to memory of the host, pinned presumably, lets the host go on."""
    return func.overloadpacket is aten.copy_ and bool(
        args[2] if len(args) > 2 else kwargs.get("non_blocking")
    )


def _copies_to_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func.overloadpacket is aten._to_copy:
        device = kwargs.get("device")
        return device is not None and device.type == "cpu"
    return func.overloadpacket is aten.copy_ and _is_on_host(args[0])
