"""Times operations in turn, on operands that are in no cache.

A disturbance of the device shall hit all operations alike. So all of them are timed again and again, forward
and backward through the list (the method of `bench network`); a sample repeats its operation for a slot of
time and takes the mean.

Some operands are in no cache, like those of a layer: weights that were used a layer ago, and activations
that a block saved for its backward. The others are cached, like the inputs of most layers.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from math import prod
from time import perf_counter
from typing import TypeVar

import torch

from meshwright.device.device_streams import synchronize
from meshwright.planner.machine.device_profile import MIN_MEASUREMENTS

UNCACHED_NBYTES, MAX_OPERANDS = 256 << 20, 512  # bytes of operands, and how many of them
MAX_OPERATION_S = 1.0  # slower operations, and larger sizes, are left out

SizeT = TypeVar("SizeT")
Operation = Callable[[], object]


@dataclass(frozen=True)
class DeviceTimer:
    """Times operations on a device: a sample repeats its operation for `slot_s` seconds, `num_sweeps`
    samples per operation.
    """

    device: torch.device
    num_sweeps: int
    slot_s: float

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""
        synchronize(self.device)

    def time_once(self, operation: Callable[[], object]) -> float:
        """Returns the seconds of one `operation`."""
        self.synchronize()
        start = perf_counter()
        operation()
        self.synchronize()
        return perf_counter() - start

    def time_sample(self, operation: Callable[[], object], about_s: float) -> float:
        """Returns the mean seconds of `operation` over as many repetitions as fit into a slot; one takes
        `about_s`.
        """
        times = max(1, round(self.slot_s / max(about_s, 1e-7)))
        self.synchronize()
        start = perf_counter()
        for _ in range(times):
            operation()
        self.synchronize()
        return (perf_counter() - start) / times


class UncachedMemory:
    """Memory of `numel` numbers, handed out piece by piece in turn: when a piece is used again, no cache has
    it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        self.memory, self._at = random_tensor(device, dtype, numel), 0

    def operands(self, *sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yields tuples of tensors of these sizes, other memory each time, forever; they are cut once, so
        that cutting takes no time.
        """
        count = max(1, min(MAX_OPERANDS, self.memory.numel() // sum(map(prod, sizes))))
        return cycle([tuple(self.take(*size) for size in sizes) for _ in range(count)])

    def take(self, *size: int) -> torch.Tensor:
        """Returns a tensor of this size."""
        numel = prod(size)
        start = self._at if self._at + numel <= self.memory.numel() else 0
        self._at = start + numel
        return self.memory[start : self._at].view(size)


def time_operations(timer: DeviceTimer, operations: Mapping[SizeT, Operation]) -> dict[SizeT, list[float]]:
    """Returns the samples of each operation in seconds. `operations` are in order of size; after a slow one,
    the rest is left out.
    """
    about: dict[SizeT, float] = {}
    for size, operation in operations.items():
        operation()  # loads kernels, brings the memory
        about[size] = timer.time_once(operation)
        if about[size] > MAX_OPERATION_S and len(about) > MIN_MEASUREMENTS:
            del about[size]
            break
    samples: dict[SizeT, list[float]] = {size: [] for size in about}
    for sweep in range(timer.num_sweeps):
        for size in list(about)[:: 1 if sweep % 2 == 0 else -1]:
            samples[size].append(timer.time_sample(operations[size], about[size]))
    return samples


def random_tensor(device: torch.device, dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Returns a tensor of normally distributed random numbers."""
    return torch.randn(size, device=device).to(dtype)
