"""Memory of the host for tensors that leave the device, and the copies between the two.

On an accelerator host memory is pinned, and copies run on a stream of their own for each direction, so that
they overlap with kernels. Where memory cannot be pinned (a limit of the system), it stays pageable: copies
then block the host, and a warning says so once. On a CPU the two tiers are separate tensors, and a copy is
complete when its call returns.
"""

import logging
import mmap
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from meshwright.comm.backends.fake import CompletedWork
from meshwright.comm.collectives.group import Work
from meshwright.comm.collectives.ledger import Ledger
from meshwright.device.device_streams import current_stream, record_event
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.step.program import Action

logger = logging.getLogger(__name__)


class CopyWork(Work):
    """A copy on `stream`; `host_waits`: whoever waits for it reads or writes its tensors on the host."""

    def __init__(self, stream: torch.Stream, device: torch.device, *, host_waits: bool) -> None:
        self._stream, self._device, self._host_waits = stream, device, host_waits
        with stream:
            self._event = record_event(device)

    def wait(self) -> None:
        """Makes later kernels of the current stream wait for the copy; and the host, if it must."""
        current_stream(self._device).wait_event(self._event)
        if self._host_waits:
            self._event.synchronize()

    def synchronize(self) -> None:
        """Returns when the copy has ended, in any thread: what was copied may be overwritten."""
        self._event.synchronize()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` on the stream of the copy."""
        with self._stream:
            callback()


class HostMemory:
    """The host memory of one rank, whose device is `device`; copies are counted in `ledger`."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device, self._ledger = device, ledger
        self._pins = device.type != "cpu"
        self._streams: dict[str, torch.Stream] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Returns a tensor in host memory, not filled; fake if `like` is."""
        if self._pins:
            try:
                return like.new_empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                logger.warning("host memory cannot be pinned, so copies block the host: %s", error)
        return like.new_empty(tuple(shape), dtype=dtype, device="cpu")

    def file_buffer(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """Returns bytes in host memory that a file can be read into directly: they begin at a page, as pinned
        memory does.
        """
        found = self.empty((nbytes,), torch.uint8, like)
        is_usable = isinstance(found, FakeTensor) or not found.data_ptr() % FILE_BLOCK_NBYTES
        return found if is_usable else page_aligned(nbytes)

    @staticmethod
    def end_of(copy: Work | None) -> Callable[[], None] | None:
        """Returns what waits, in any thread, until `copy` has ended; None if it has."""
        return copy.synchronize if isinstance(copy, CopyWork) else None

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the host in memory that is fast to copy: itself, if nothing is pinned."""
        return self.empty(tensor.shape, tensor.dtype, tensor).copy_(tensor) if self._pins else tensor

    def start_copies(
        self,
        action: Action,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        overwrites_sources: bool = False,
        read_on_host: bool = True,
    ) -> Work:
        """Copies (target, source) pairs for `action`, on its stream, after the kernels launched so far.

        Targets have the shapes and dtypes of their sources. Returns the work; the host waits in it for a copy
        to the host, unless `read_on_host` says that nobody reads it there, and for one
        whose sources it overwrites (`overwrites_sources`).
        """
        self._ledger.record_copy(action.name, sum(source.nbytes for _, source in pairs))
        if self._device.type == "cpu":
            for target, source in pairs:
                target.copy_(source)
            return CompletedWork()
        if action.stream not in self._streams:
            self._streams[action.stream] = torch.Stream(device=self._device)
        stream = self._streams[action.stream]
        stream.wait_stream(current_stream(self._device))
        with stream:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                for tensor in (target, source):
                    if not tensor.is_cpu:  # its memory is not given to another tensor before the copy ends
                        tensor.record_stream(stream)
        host_waits = (read_on_host and action.stream == "copy_out") or overwrites_sources
        return CopyWork(stream, self._device, host_waits=host_waits)


def page_aligned(nbytes: int) -> torch.Tensor:
    """Returns `nbytes` of memory that begins at a page, as direct reads and writes need it; zeros."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)


def without_memory(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the device of `like` with this shape, and the memory of one element.

    It stands for a tensor that rests in another tier; reading it is an error that results show.
    """
    return like.new_zeros((), dtype=dtype).expand(tuple(shape))
