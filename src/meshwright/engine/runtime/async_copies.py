"""Copies between the host and a device that the host does not wait for.

A blocking copy (`.item()`, `.tolist()`, `.to(device)` of pageable memory) returns when the device has done
all that was launched before it, and nothing is launched meanwhile. Here copies use pinned memory and a stream
of their own, so the host is ahead of the device by up to a step:

    host       launch step k ..................  launch step k+1 ............
    copies        batch k ->      <- count k         batch k+1 ->    <- loss k
    compute    ... step k-1 ....  step k ...................  step k+1 ......

Reading the count of step k waits for the device to begin that step, not to end it. On the CPU there is
nothing to copy: numbers are read at once.
"""

from collections.abc import Callable, Sequence

import torch

from meshwright.comm.collectives.group import Work
from meshwright.device.device_streams import current_stream, record_event
from meshwright.model.loss.loss_definition import Batch

ALIGNMENT = 128  # bytes; tensors in the buffer of a copy begin at multiples of it


class HostCopy(Work):
    """Numbers of a device on their way to the host, on `stream`; with `after`, the result of a collective.

    As a collective's work it stands for that collective: who waits for it sees the result.
    """

    def __init__(self, numbers: torch.Tensor, stream: torch.Stream, after: Work | None = None) -> None:
        self._numbers, self._stream = numbers, stream  # alive until they are copied
        self._pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        with stream:
            if after is not None:
                after.wait()
            self._pinned.copy_(numbers, non_blocking=True)
            self._event = record_event(numbers.device)

    def wait(self) -> None:
        """Makes later kernels of the current stream wait for the numbers."""
        current_stream(self._numbers.device).wait_event(self._event)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the stream of the copy."""
        with self._stream:
            callback()

    def values(self) -> list[float]:
        """Returns the numbers; waits until the device has come to the copy."""
        self._event.synchronize()
        return self._pinned.tolist()


class FinishedOnWait(Work):
    """A work that whoever waits for it first finishes by `finish`, once."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None  # lets go of what it holds

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._work.add_done_callback(callback)


class DeviceCopies:
    """The copies of one rank between the host and `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_async = device, device.type != "cpu"
        self._stream = torch.Stream(device=device) if self.is_async else None

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `tensors` on the device, all in one copy; those that are there already are not copied."""
        if self._stream is None:
            return [tensor.to(self._device) for tensor in tensors]
        found, on_host = list(tensors), [i for i, tensor in enumerate(tensors) if tensor.is_cpu]
        ends = [0]
        for i in on_host:
            ends.append(ends[-1] + -(-tensors[i].nbytes // ALIGNMENT) * ALIGNMENT)
        pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
        for i, begin in zip(on_host, ends, strict=False):
            _view_as(pinned, begin, tensors[i]).copy_(tensors[i])
        with self._stream:
            buffer = pinned.to(self._device, non_blocking=True)
        compute = current_stream(self._device)
        compute.wait_stream(self._stream)
        buffer.record_stream(compute)  # or its memory could be given to the next copy too early
        for i, begin in zip(on_host, ends, strict=False):
            # a version counter of its own: a model may change one of its inputs in place
            found[i] = _view_as(buffer, begin, tensors[i]).data
        return found

    def batches_to_device(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """Returns the microbatches of a step on the device, all in one copy."""
        tensors = iter(self.to_device([value for batch in microbatches for value in batch.values()]))
        return [{key: next(tensors) for key in batch} for batch in microbatches]

    def start_read(self, numbers: torch.Tensor, work: Work) -> HostCopy:
        """Starts to copy `numbers`, the result of the collective `work`; returns the work in place of it."""
        if self._stream is None:
            raise ValueError("numbers of the CPU are read where they are")
        return HostCopy(numbers, self._stream, work)

    def read(self, numbers: Sequence[torch.Tensor]) -> Callable[[], Sequence[float]]:
        """Returns a function that returns the elements of `numbers`, in their order, as they are now.

        On a device it waits for what was launched before this call.
        """
        if not self.is_async:
            values = [value for number in numbers for value in number.reshape(-1).tolist()]
            return lambda: values
        joined = torch.cat([number.detach().double().reshape(-1) for number in numbers])
        return HostCopy(joined, current_stream(self._device)).values


def _view_as(buffer: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    return buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
