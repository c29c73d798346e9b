"""A process group whose collectives run on streams of their own, as those of NCCL do, and move nothing.

    issue        the communication stream waits for the current one, reads the operands, writes the results
    Work.wait    the current stream waits for the communication stream; the host does not
    get_future   calls back at once, on a stream of its own that waits for the collective

One stream per group for collectives, and one per peer for sends and receives, as NCCL has without batching.
Operands stay alive until the wait: torch keeps them even if nobody waits. `torch.distributed` has the group
as the backend `streams`, so meshwright's own groups, works and algorithms run over it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.races.fake_streams import DEVICE
from benchmarks.races.race_checker import RaceChecker

BACKEND = "streams"


class StreamWork(dist.Work):
    """A collective on a communication stream, which has recorded `event` behind it."""

    def __init__(self, event: torch.Event, release: Callable[[], object]) -> None:
        super().__init__()
        self._event, self._release = event, release

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Makes later work of the current stream wait for the result."""
        torch.accelerator.current_stream().wait_event(self._event)
        self._release()
        return True

    def is_completed(self) -> bool:
        """Returns whether it is done; no work takes time here."""
        return True

    def get_future(self) -> Any:
        """Returns itself: it calls back on a stream that waits for it."""
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback` at once, on a stream of its own that waits for the result."""
        stream = torch.Stream(DEVICE)
        stream.wait_event(self._event)
        with stream:
            callback(self)


class StreamProcessGroup(dist.ProcessGroup):
    """The process group of one rank; `checker` hears what each collective reads and writes."""

    def __init__(self, rank: int, size: int, checker: RaceChecker) -> None:
        super().__init__(rank, size)  # pyrefly: ignore[missing-argument, bad-argument-type]  a second form
        self._rank, self._checker = rank, checker
        self._streams: dict[int | None, torch.Stream] = {}  # by peer; None: of collectives
        self._kept: dict[int, tuple[torch.Tensor, ...]] = {}  # by work: the operands
        self._num_works = 0

    @property
    def group_name(self) -> Any:
        """A name; only functional collectives would look for it."""
        return f"{BACKEND} {id(self)}"

    # operands as torch.distributed passes them, options behind them

    def allreduce(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Changes the tensors."""
        return self._issue("all_reduce", (), args[0])

    def broadcast(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Reads the tensors at the root, and writes them elsewhere."""
        tensors, options = args
        is_root = options.rootRank == self._rank
        return self._issue("broadcast", tensors if is_root else (), () if is_root else tensors)

    def reduce(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Changes the tensors at the root, and reads them elsewhere."""
        tensors, options = args
        is_root = options.rootRank == self._rank
        return self._issue("reduce", () if is_root else tensors, tensors if is_root else ())

    def all_gather_single(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the first tensor, and reads the second one."""
        return self._issue("all_gather", args[1:2], args[:1])

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the first tensor, and reads the second one."""
        return self._issue("reduce_scatter", args[1:2], args[:1])

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the first tensor, and reads the second one."""
        return self._issue("all_to_all", args[1:2], args[:1])

    def gather(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the first tensors, which only the root has, and reads the second ones."""
        return self._issue("gather", args[1], [each for peer in args[0] for each in peer])

    def scatter(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the first tensors, and reads the second ones, which only the root has."""
        return self._issue("scatter", [each for peer in args[1] for each in peer], args[0])

    def send(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Reads the tensors, on the stream of the peer."""
        return self._issue("send", args[0], (), peer=args[1])

    def recv(self, *args: Any, **kwargs: Any) -> StreamWork:
        """Writes the tensors, on the stream of the peer."""
        return self._issue("recv", (), args[0], peer=args[1])

    def _issue(
        self,
        collective: str,
        reads: Iterable[torch.Tensor],
        writes: Iterable[torch.Tensor],
        peer: int | None = None,
    ) -> StreamWork:
        reads, writes = tuple(reads), tuple(writes)
        stream = self._streams.get(peer)
        if stream is None:
            stream = self._streams[peer] = torch.Stream(DEVICE)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            self._checker.access(collective, reads=reads, writes=writes)
        self._num_works += 1
        number = self._num_works
        self._kept[number] = (*reads, *writes)
        return StreamWork(stream.record_event(), partial(self._kept.pop, number, None))


@contextmanager
def stream_backend(rank: int, size: int, checker: RaceChecker) -> Iterator[None]:
    """Initializes torch.distributed as `rank` of `size`, with groups that report to `checker`."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StreamProcessGroup:
        return StreamProcessGroup(rank, size, checker)

    dist.Backend.register_backend(BACKEND, create, devices=["cuda", "cpu"])
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
