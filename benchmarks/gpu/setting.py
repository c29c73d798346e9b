"""Where a section runs, and how it times and compares."""

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import torch

from meshwright.device.device_streams import synchronize

Value = TypeVar("Value")


@dataclass(frozen=True)
class Setting:
    """Where a section runs; `tiny` sizes fit a CPU, `folder` is a place for its files, and what it finds is
    written to `result`.
    """

    device: torch.device
    tiny: bool
    folder: Path
    result: Path

    def size(self, full: Value, tiny: Value) -> Value:
        """Returns the size of this run."""
        return tiny if self.tiny else full

    def keep(self, found: Mapping[str, object]) -> None:
        """Writes what has been found so far, so that a limit of time loses nothing of it."""
        self.result.write_text(json.dumps(found, default=str))


def same_bits(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors have the same bits; NaN equals itself."""
    pairs = zip(tensors, others, strict=True)
    return all(one.numpy().tobytes() == two.numpy().tobytes() for one, two in pairs)


def clear_memory(device: torch.device) -> None:
    """Gives back what the allocator of `device` has cached, and forgets its peak; a CPU has none."""
    if device.type != "cpu":
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int, warm_up: int = 1) -> float:
    """Returns the mean seconds of `call`, after `warm_up` calls."""
    for _ in range(warm_up):
        call()
    synchronize(device)
    start = perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (perf_counter() - start) / repeats
