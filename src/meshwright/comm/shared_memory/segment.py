"""One memory segment that the ranks of a group share, seen from one of them.

The Python interface of memory.c. Whether a rank is still running is seen from outside
(comm/watchdog/process_identity.py).
"""

import ctypes
import os
import weakref
from collections.abc import Sequence

from meshwright.comm.shared_memory.compile_library import SharedMemoryUnavailable, load_library
from meshwright.comm.watchdog.process_identity import HostProcess

DONE, PENDING, MISMATCH = range(3)  # answers, as in counter.h
MAX_RANKS = 256  # as in chunks.h


def create_memory(size: int, secret: bytes) -> int:
    """Returns the descriptor of fresh memory for `size` ranks that begins with `secret`.

    The caller closes it. Raises SharedMemoryUnavailable.
    """
    try:
        fd = os.memfd_create("meshwright", os.MFD_CLOEXEC)
        os.ftruncate(fd, load_library().shared_bytes(size))
        os.pwrite(fd, secret, 0)
    except OSError as error:
        raise SharedMemoryUnavailable(f"no memory to share ({error.strerror})") from error
    return fd


def open_memory(owner: HostProcess, fd: int, secret: bytes) -> int:
    """Returns a descriptor of the memory that `owner` has as `fd` and that begins with `secret`.

    Raises SharedMemoryUnavailable.
    """
    path = f"/proc/{owner.pid}/fd/{fd}"
    try:
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SharedMemoryUnavailable(f"{path} cannot be opened ({error.strerror})") from error
    try:
        found = os.pread(own, len(secret), 0)
    except OSError:
        found = b""
    if found != secret:
        os.close(own)
        raise SharedMemoryUnavailable(f"{path} is not the memory of this job")
    return own


class SharedSegment:
    """The memory behind the descriptor `fd`, mapped until this object is freed.

    `processes` are the ranks, in order. `spin_ns` is how long a wait spins before it sleeps. Raises
    SharedMemoryUnavailable when the memory cannot be mapped.
    """

    def __init__(self, fd: int, processes: Sequence[HostProcess], index: int, spin_ns: int) -> None:
        library = load_library()
        self.size = len(processes)
        self._processes = tuple(processes)
        self._address = library.shared_map(fd, self.size, index, spin_ns)
        if not self._address:
            raise SharedMemoryUnavailable("the memory cannot be mapped")
        self._post, self._finish, self._wait_for_place = (
            library.shared_post,
            library.shared_finish,
            library.shared_wait_place,
        )
        self._library = library
        # not at exit: the communication thread may still use it, and the kernel unmaps it in any case
        self._finalizer = weakref.finalize(self, library.shared_unmap, self._address)
        self._finalizer.atexit = False  # pyrefly: ignore[missing-attribute]  a property that its declaration leaves out

    def post(
        self, number: int, kind: int, dtype: int, source: int, operand: int, result: int, nbytes: int
    ) -> bool:
        """Posts operation `number`; returns False, without effect, when its place is still in use.

        `operand` and `result` are addresses that stay valid until it is finished; `nbytes` is the operand's.
        """
        return self._post(self._address, number, kind, dtype, source, operand, result, nbytes) == DONE

    def finish(self, number: int, wait_ns: int) -> int:
        """DONE: the result of operation `number` is in place. PENDING: call again.

        MISMATCH: ranks issued different operations.
        """
        return self._finish(self._address, number, wait_ns)

    def wait_for_place(self, number: int, wait_ns: int) -> int:
        """Returns DONE when the place of operation `number` is free, PENDING otherwise."""
        return self._wait_for_place(self._address, number, wait_ns)

    def is_consistent(self, number: int) -> bool:
        """Returns whether all ranks that have posted operation `number` issued the same."""
        return bool(self._library.shared_agree(self._address, number))

    def posted_call(self, number: int, index: int) -> tuple[int, int, int, int] | None:
        """Returns what the rank at `index` posted as operation `number`: kind, dtype, source, nbytes.

        None if it has not.
        """
        words = (ctypes.c_uint64 * 4)()
        if not self._library.shared_posted(self._address, number, index, words):
            return None
        kind, dtype, source, nbytes = words
        return kind, dtype, source, nbytes

    def awaited_indices(self, number: int, *, for_place: bool) -> list[int]:
        """Returns the indices of the ranks for which operation `number` (or its place) waits here."""
        return [
            k for k in range(self.size) if self._library.shared_awaits(self._address, number, k, for_place)
        ]

    def lost_indices(self) -> dict[int, str]:
        """Returns the indices of the ranks that will post nothing more, each with the reason."""
        left = {k: "has left" for k in range(self.size) if self._library.shared_has_left(self._address, k)}
        return left | {
            k: "is gone: its process has ended"
            for k, each in enumerate(self._processes)
            if not each.is_running
        }

    def leave(self) -> None:
        """Marks that this rank posts nothing more."""
        self._library.shared_leave(self._address)
