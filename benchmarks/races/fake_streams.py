"""Streams and events of a CUDA device that does nothing: what they order is read from a log.

`torch.Stream`, `torch.Event` and the autograd engine reach the device guard, which writes each record, wait
and synchronization to a log (benchmarks/harness/noop_cuda.cpp). A CPU build of torch has no
`torch.cuda.Stream`: while `cuda_streams` is active, what `torch.cuda` has about streams is `torch.Stream`.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

DEVICE = torch.device("cuda", 0)
CAPACITY = 4096  # entries that are taken at a time


class LogEntry(NamedTuple):
    """One entry: its kind, the event or the storage that it is about, and the stream."""

    kind: int
    subject: int
    stream: int


RECORD, BLOCK, SYNC_EVENT, SYNC_STREAM, SYNC_DEVICE, FREED = range(6)


class StreamLog:
    """The log of the device guard, from now on. Needs a process of `run_with_fake_cuda`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.stream_log_take.restype = ctypes.c_int64
        self._library.stream_log_watch.restype = ctypes.c_int64
        self._library.stream_log_watch.argtypes = [ctypes.c_void_p]
        self._size = ctypes.c_int64.in_dll(self._library, "stream_log_size")
        self._entries = (ctypes.c_int64 * (3 * CAPACITY))()
        self._library.stream_log_start()
        self.take()

    def take(self) -> list[LogEntry]:
        """Returns the entries since the last call, in order."""
        taken: list[LogEntry] = []
        while self._size.value:
            count = self._library.stream_log_take(self._entries, CAPACITY)
            values = self._entries[: 3 * count]
            taken += [LogEntry(*values[i : i + 3]) for i in range(0, len(values), 3)]
        return taken

    def watch(self, storage: torch.UntypedStorage) -> int:
        """Returns the number that a FREED entry will have when this storage of a fake tensor is freed."""
        return self._library.stream_log_watch(storage._cdata)


def current_stream(device: object = None) -> torch.Stream:
    """Returns the current stream of this thread."""
    return torch.accelerator.current_stream()


@contextmanager
def cuda_streams() -> Iterator[None]:
    """Makes streams and events of `torch.cuda` those of the device that does nothing."""

    def make_stream(device: object = None, priority: int = 0, **more: Any) -> torch.Stream:
        return torch.Stream(DEVICE, priority=priority)

    def make_event(enable_timing: bool = False, **more: Any) -> torch.Event:
        return torch.Event(DEVICE, enable_timing=enable_timing)

    def synchronize(device: object = None) -> None:
        ctypes.CDLL(None).stream_log_synchronize_device()

    with (
        patch.object(torch.accelerator, "synchronize", synchronize),
        patch.multiple(
            torch.cuda,
            Stream=make_stream,
            Event=make_event,
            stream=lambda stream: stream,  # which is a context manager
            current_stream=current_stream,
            default_stream=lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=1),
            synchronize=synchronize,
            current_device=lambda: 0,
            get_device_capability=lambda device=None: (8, 0),
            set_device=lambda device: None,
            _lazy_init=lambda: None,
        ),
    ):
        yield
