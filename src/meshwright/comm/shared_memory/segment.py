"""One piece of memory that the ranks of a group share, seen from one of them: memory.c in Python's words.

Whether a rank still runs is seen from outside (comm/host.py).
"""

import ctypes
import os
import weakref
from collections.abc import Sequence

from meshwright.comm.shared_memory.build import Unavailable, load
from meshwright.comm.watchdog.host import Process

DONE, NOT_YET, DISAGREE = range(3)  # answers, as in bell.h
MOST_RANKS = 256  # as in chunks.h
WORD_BYTES = 64  # at the start of the memory


def memory(size: int, word: bytes) -> int:
    """The descriptor of fresh memory for `size` ranks that begins with `word`; the caller closes it. Raises Unavailable."""
    try:
        fd = os.memfd_create("meshwright", os.MFD_CLOEXEC)
        os.ftruncate(fd, load().shared_bytes(size))
        os.pwrite(fd, word, 0)
    except OSError as error:
        raise Unavailable(f"no memory to share ({error.strerror})") from error
    return fd


def opened(owner: Process, fd: int, word: bytes) -> int:
    """A descriptor of the memory that `owner` holds as `fd` and that begins with `word`. Raises Unavailable."""
    path = f"/proc/{owner.number}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable(f"{path} cannot be opened ({error.strerror})") from error
    try:
        found = os.pread(own, len(word), 0)
    except OSError:
        found = b""
    if found != word:
        os.close(own)
        raise Unavailable(f"{path} is not the memory of this job")
    return own


class Segment:
    """The memory behind the descriptor `fd`, mapped until this object is gone. `processes` are the ranks, in order.

    `spin_ns` is how long a wait looks before it sleeps. Raises Unavailable when the memory cannot be mapped.
    """

    def __init__(self, fd: int, processes: Sequence[Process], index: int, spin_ns: int) -> None:
        library = load()
        self.size = len(processes)
        self._processes = tuple(processes)
        self._here = library.shared_map(fd, self.size, index, spin_ns)
        if not self._here:
            raise Unavailable("the memory cannot be mapped")
        self._post, self._finish, self._room = library.shared_post, library.shared_finish, library.shared_room
        self._library = library
        # not at exit: a thread of the lane may still be in there, and the kernel unmaps in any case
        self._unmapping = weakref.finalize(self, library.shared_unmap, self._here)
        self._unmapping.atexit = False  # pyrefly: ignore[missing-attribute]  a property that its declaration leaves out

    def post(
        self, number: int, kind: int, dtype: int, source: int, operand: int, result: int, nbytes: int
    ) -> bool:
        """Come to operation `number`; False, and nothing is done, when its place is still in use.

        `operand` and `result` are addresses that stay valid until it is finished; `nbytes` is the operand's.
        """
        return self._post(self._here, number, kind, dtype, source, operand, result, nbytes) == DONE

    def finish(self, number: int, wait_ns: int) -> int:
        """DONE: the result of operation `number` is in place. NOT_YET: call again. DISAGREE: ranks want different things."""
        return self._finish(self._here, number, wait_ns)

    def room(self, number: int, wait_ns: int) -> int:
        """DONE when the place of operation `number` is free, NOT_YET otherwise."""
        return self._room(self._here, number, wait_ns)

    def agree(self, number: int) -> bool:
        """Whether all that have come to operation `number` want the same."""
        return bool(self._library.shared_agree(self._here, number))

    def said(self, number: int, index: int) -> tuple[int, int, int, int] | None:
        """What the rank at `index` wants in operation `number`: kind, dtype, source, nbytes; None when it has not come."""
        words = (ctypes.c_uint64 * 4)()
        if not self._library.shared_said(self._here, number, index, words):
            return None
        kind, dtype, source, nbytes = words
        return kind, dtype, source, nbytes

    def awaited(self, number: int, *, for_room: bool) -> list[int]:
        """The indices of the ranks for which operation `number` (or its place) waits here."""
        return [k for k in range(self.size) if self._library.shared_awaits(self._here, number, k, for_room)]

    def lost(self) -> dict[int, str]:
        """The indices of the ranks that come to nothing more, each with why."""
        left = {k: "has left" for k in range(self.size) if self._library.shared_has_left(self._here, k)}
        return left | {
            k: "is gone: its process has ended" for k, each in enumerate(self._processes) if not each.runs
        }

    def leave(self) -> None:
        """Say that this rank comes to nothing more."""
        self._library.shared_leave(self._here)
