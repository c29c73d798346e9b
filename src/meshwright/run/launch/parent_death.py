"""The lifeline: ends every rank when the process that launched the ranks is gone.

The lifeline is the read end of a pipe whose write end only the launching process holds. When that process is
gone, for whatever reason, the operating system closes its end; a thread of every rank waits for this and
ends the rank.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Lifeline(NamedTuple):
    """The ends of the pipe: the ranks read, and only the launching process keeps the other end."""

    read_fd: int
    write_fd: int


@contextmanager
def lifeline() -> Iterator[Lifeline]:
    """Yields the pipe for the ranks; its write end closes with this process, or on exit."""
    read_fd, write_fd = os.pipe()
    try:
        yield Lifeline(read_fd, write_fd)
    finally:
        os.close(write_fd)
        os.close(read_fd)


def end_with_parent(lifeline_fd: int) -> None:
    """Ends this process when the launching process is gone; a thread waits for that."""
    os.set_inheritable(lifeline_fd, False)
    threading.Thread(target=_end_without_parent, args=(lifeline_fd,), daemon=True, name="lifeline").start()


def _end_without_parent(lifeline_fd: int) -> None:
    while os.read(lifeline_fd, 1):
        pass  # nothing is ever written; the read returns when the other end is closed
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # takes data workers along
    os._exit(1)
