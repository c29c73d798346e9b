"""A device whose numbers reach the host late, played on the CPU: for tests of what a GPU does without one."""

from collections.abc import Callable, Sequence

import torch

from meshwright.comm.collectives.group import Work
from meshwright.model.loss.loss_definition import Batch


class LateCopy(Work):
    """The result of a collective, which is not read before somebody asks for it."""

    def __init__(self, numbers: torch.Tensor, after: Work) -> None:
        self._numbers, self._after = numbers, after

    def wait(self) -> None:
        self._after.wait()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._after.add_done_callback(callback)

    def values(self) -> list[float]:
        self._after.wait()
        return self._numbers.tolist()


class LateCopies:
    """Stands in for DeviceCopies; `reads` are the numbers of steps, in the order in which they are read."""

    reads: list[list[float]]
    is_async = True

    def __init__(self, device: torch.device) -> None:
        self.reads = []

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def batches_to_device(self, microbatches: Sequence[Batch]) -> list[Batch]:
        return list(microbatches)

    def start_read(self, numbers: torch.Tensor, work: Work) -> LateCopy:
        return LateCopy(numbers, work)

    def read(self, numbers: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        copied = torch.cat([number.detach().double().reshape(-1) for number in numbers])

        def values() -> list[float]:
            self.reads.append(copied.tolist())
            return self.reads[-1]

        return values
