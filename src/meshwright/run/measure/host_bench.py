"""Times what offload takes of a host: copies between it and a device, and AdamW on its cores.

    host link      float32 from pinned memory to the device, and back: bytes/s one way, of the slower
                   direction. Where the device is the CPU, from memory to memory
    host memory    torch's fused AdamW in float32: it reads gradient, weight and two moments, and writes all
                   but the gradient, 28 bytes per element

Both run with torch's current number of threads, on operands that no cache holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch

from meshwright.comm.collectives.ledger import Ledger
from meshwright.engine.runtime.host_memory import HostMemory
from meshwright.run.measure.operation_timer import DeviceTimer, time_operations

NUMEL, QUICK_NUMEL = 1 << 24, 1 << 21  # elements of an operand
ADAMW_NBYTES = 28


def host_rates(timer: DeviceTimer, *, quick: bool = False) -> tuple[float, float]:
    """Returns the bytes per second that are copied between the host and the device of `timer`, one way, and
    those that AdamW reads and writes on the host.
    """
    numel, cpu = QUICK_NUMEL if quick else NUMEL, torch.device("cpu")
    on_device = torch.ones(numel, device=timer.device)
    on_host = HostMemory(timer.device, Ledger()).empty((numel,), torch.float32, on_device)
    copies = time_operations(
        timer,
        {
            "out": lambda: on_host.copy_(on_device, non_blocking=True),
            "in": lambda: on_device.copy_(on_host, non_blocking=True),
        },
    )
    weight = torch.nn.Parameter(torch.ones(numel))
    weight.grad = torch.ones(numel)
    steps = time_operations(
        replace(timer, device=cpu), {"step": torch.optim.AdamW([weight], lr=1e-6, fused=True).step}
    )
    return 4 * numel / _slowest(copies.values()), ADAMW_NBYTES * numel / _slowest(steps.values())


def _slowest(samples: Iterable[Sequence[float]]) -> float:
    return max(median(each) for each in samples)
