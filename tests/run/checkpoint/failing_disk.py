"""A machine whose disk is full, or which dies, at a chosen call to the system, for the tests of checkpoints.

`Machine` stands between the library and the system. It counts the calls that change the disk, by one thread,
and at the chosen one it fails with ENOSPC, or the process "dies": before the call, after it, or in the middle
of a write.
"""

import errno
import os
from collections.abc import Callable
from threading import get_ident
from typing import Literal

import pytest

WRITES = ("mkdir", "write", "fsync", "rename")
REMOVALS = ("unlink", "rmdir")
How = Literal["full", "dead before", "dead after", "torn"]


class Death(BaseException):
    """The process is gone: nothing of its own runs any more."""


class Machine:
    """The system calls of one thread; the `at`-th of them goes wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]) -> None:
        self.thread: int | None = None
        self.at, self.count, self.how = -1, 0, "full"
        for name in calls:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def arm(self, at: int, how: How) -> None:
        self.thread, self.at, self.count, self.how = get_ident(), at, 0, how

    def disarm(self) -> bool:
        """Stop interfering; whether the chosen call was reached."""
        self.thread = None
        return self.count > self.at

    def _watched(self, name: str, call: Callable) -> Callable:
        def watched(*args, **kwargs):
            asks_for_what_is_there = name == "mkdir" and os.path.isdir(args[0])
            if get_ident() != self.thread or asks_for_what_is_there:
                return call(*args, **kwargs)
            self.count += 1
            if self.count - 1 != self.at:
                return call(*args, **kwargs)
            if self.how == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.how == "torn" and name == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            elif self.how == "dead after":
                call(*args, **kwargs)
            self.thread = None  # the dead make no more calls
            raise Death

        return watched
