"""Timing one operation after another, so that what disturbs a device for a while disturbs all of them alike.

The method is that of `bench network` (comm/links.py): cells are gone through again and again, forwards and backwards in turn. A
sample repeats its operation for a slot of time and takes the mean.

Operands lie far off, in no cache, where a layer's do: weights that were used a layer ago, and what a block has kept for its
backward. Else they are warm, as what a layer takes in mostly is.

How evenly a device goes (core/steadiness.py): the same work over and over, timed, and put together to longer stretches.

    slices        [ ][  ][ ][ ][   ][ ][ ][  ]        the same products each, some milliseconds; ranks meet before each 64
    stretches     [ ][  ] ...    [   ][  ] ...    [      ][       ]        of 1, 4, 16 and 64 slices, of which there are enough

Every rank does as much in a slice as every other, and no stretch goes on beyond a meeting: so stretches that are compared are the
same work at the same moment.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch

from meshwright.plan.hardware.device_profile import MIN_MEASUREMENTS
from meshwright.plan.hardware.stragglers import LagSample

UNCACHED_NBYTES, MAX_OPERANDS = 256 << 20, 512  # bytes, of which each operation reads others, and how often
MAX_OPERATION_S = 1.0  # an operation that takes longer, and all that are larger, is left out

SizeT = TypeVar("SizeT")
Operation = Callable[[], object]


@dataclass(frozen=True)
class DeviceTimer:
    """The clock of a device: a sample repeats its operation for `slot_s` seconds, a cell has `sweeps` samples."""

    device: torch.device
    num_sweeps: int
    slot_s: float

    def synchronize(self) -> None:
        """Return when the device has done all that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_once(self, operation: Callable[[], object]) -> float:
        """Seconds of `operation`, alone."""
        self.synchronize()
        start = perf_counter()
        operation()
        self.synchronize()
        return perf_counter() - start

    def time_sample(self, operation: Callable[[], object], about_s: float) -> float:
        """Seconds of `operation`, the mean of as many in a row as fit into a slot; one takes `about_s`."""
        times = max(1, round(self.slot_s / max(about_s, 1e-7)))
        self.synchronize()
        start = perf_counter()
        for _ in range(times):
            operation()
        self.synchronize()
        return (perf_counter() - start) / times


class UncachedMemory:
    """So many numbers of memory, given out piece by piece, round and round: by the time a piece comes again no cache has it."""

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        self.memory, self._at = random_tensor(device, dtype, numel), 0

    def operands(self, *sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
        """Pieces of these sizes, others each time, for ever: they are cut once, so that cutting takes no time."""
        count = max(1, min(MAX_OPERANDS, self.memory.numel() // sum(map(prod, sizes))))
        return cycle([tuple(self.take(*size) for size in sizes) for _ in range(count)])

    def take(self, *size: int) -> torch.Tensor:
        """A piece of this size."""
        numel = prod(size)
        start = self._at if self._at + numel <= self.memory.numel() else 0
        self._at = start + numel
        return self.memory[start : self._at].view(size)


def time_operations(timer: DeviceTimer, operations: Mapping[SizeT, Operation]) -> dict[SizeT, list[float]]:
    """The samples of each cell, in seconds. `cells` come in rising order; from one that takes too long on, they are left out."""
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
    """Numbers drawn from a normal distribution."""
    return torch.randn(size, device=device).to(dtype)


MATMUL_SIZE, NUM_MATMULS = 256, 10  # of a slice: on a core of today about 5 ms, on every rank the same work
SLICES_PER_BATCH, NUM_BATCHES, NUM_QUICK_BATCHES = 64, 40, 3
WINDOW_GROWTH, MIN_WINDOWS = 4, 12  # of a length there are so many stretches at least


def time_slices(
    device: torch.device, barrier: Callable[[], None] = lambda: None, *, quick: bool = False
) -> tuple[float, ...]:
    """Seconds of each of many slices in a row on `device`, with as many threads as torch is set to; ranks `meet` on the way.

    None on a GPU: there a slice would time the host, which asks ahead; nobody has looked yet how evenly one goes.
    """
    if device.type != "cpu":
        return ()
    batch, found = slice_batch_timer(), list[float]()
    for _ in range(NUM_QUICK_BATCHES if quick else NUM_BATCHES):
        barrier()
        found += batch()
    return tuple(found)


def slice_batch_timer() -> Callable[[], tuple[float, ...]]:
    """What works for a batch of slices, and says how many seconds each took."""
    x = torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    into = torch.empty_like(x)

    def one() -> float:
        start = perf_counter()
        for _ in range(NUM_MATMULS):
            torch.mm(x, x, out=into)
        return perf_counter() - start

    one()
    return lambda: tuple(one() for _ in range(SLICES_PER_BATCH))


def timing_windows(ranks: Sequence[Sequence[float]]) -> tuple[LagSample, ...]:
    """What the slices of each of `ranks`, in seconds and as they followed each other, say of lengths of which there are enough.

    Of several ranks those are compared that worked at the same moment: one that is always slower is behind always, and what slows
    all of them down keeps nobody waiting. Of one rank all are compared with each other, as if they were of several.
    """
    found, count, shortest = [], 1, min(map(len, ranks)) // SLICES_PER_BATCH * SLICES_PER_BATCH
    while count <= SLICES_PER_BATCH and shortest // count >= MIN_WINDOWS:
        whole = np.asarray([each[:shortest] for each in ranks]).reshape(len(ranks), -1, count).sum(axis=2)
        mean = float(whole.mean())
        apart = (
            _apart(whole[0]) if len(ranks) == 1 else float(np.mean([_apart(moment) for moment in whole.T]))
        )
        found.append(LagSample(mean, apart / 2 / mean))
        count *= WINDOW_GROWTH
    return tuple(found)


def _apart(some: np.ndarray) -> float:
    """The mean distance of two of these."""
    count = len(some)
    places = 2 * np.arange(count) - count + 1
    return float(2 * (places * np.sort(some)).sum() / (count * (count - 1)))
