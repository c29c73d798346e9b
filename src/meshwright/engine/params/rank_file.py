"""The file of a rank for tensors that rest on disk: it is read and written beside the training thread.

    training thread    READ(0) READ(1)  STEP(0) WRITE(0) READ(2)  STEP(1) WRITE(1) READ(3)
    thread of the file [READ(0)][READ(1)]       [WRITE(0)][READ(2)]       [WRITE(1)][READ(3)]

One thread reads and writes in the order in which this was started, so a buffer may be filled again once its
write was started. It moves large pieces: one at a time keeps a disk as busy as many do.

The file has no name in its folder (O_TMPFILE): the system removes it with the process that made it, however
that ends, and no other run or rank can open it. It is allocated in full at once: a full disk is found here.

Reads and writes pass by the page cache (O_DIRECT), which would take memory from everything else; where the
file system cannot do that, a warning says so, and pages leave the cache after each. The file is also mapped
into memory, as `tensor`, for what is read and written rarely: initial values and checkpoints. The system
keeps mapped pages and direct transfers consistent, if nobody writes a mapped page while a write is under way.

A mapped page that cannot be read ends the process with SIGBUS, without a message. Where a checkpoint is saved
or loaded, `load_pages` asks the system for the pages first, which makes it an error (Linux 5.14 and newer).
"""

import errno
import fcntl
import logging
import mmap
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from tempfile import TemporaryFile
from typing import NoReturn
from weakref import finalize

import torch

from meshwright.comm.collectives.group import Work
from meshwright.engine.runtime.cpu_allocator import advise_kernel
from meshwright.plan.hardware.memory_tiers import FILE_BLOCK_NBYTES
from meshwright.plan.job.errors import PlanError, format_nbytes

logger = logging.getLogger(__name__)

LOCATION = "strategies.disk_offload.folder"
FIXES = {
    errno.ENOENT: "make the folder on every host, or mount its disk",
    errno.ENOTDIR: "name a folder, not a file",
    errno.EACCES: "name a folder that this user may write to",
    errno.EPERM: "name a folder that this user may write to",
    errno.EROFS: "name a folder on a disk that is mounted for writing",
    errno.ENOSPC: "free that much, name a folder on a larger disk, or shard over more ranks (zero)",
    errno.EDQUOT: "raise the quota of this user, name another folder, or shard over more ranks (zero)",
    errno.EIO: "look at the disk (dmesg), name a folder on another one, and resume from the last checkpoint",
}
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # of Linux; Python has no names for them
OTHER_FIX = "name a folder on another disk, and resume from the last checkpoint"


class FileWork(Work):
    """A read or a write that is under way; whoever waits for it gets its error."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Returns when the bytes have arrived. Raises PlanError if they did not."""
        self._future.result()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Calls `callback` in the thread of the file."""
        self._future.add_done_callback(lambda _: callback())


class RankFile:
    """A file of `nbytes` zeros, a multiple of FILE_BLOCK_NBYTES above 0, without a name in `folder`.

    `tensor` are its bytes, mapped; `is_direct` tells whether reads and writes pass by the page cache. Raises
    PlanError if the file cannot be made.
    """

    def __init__(self, folder: str, nbytes: int, location: str = LOCATION) -> None:
        if sys.platform != "linux":
            text = f"tensors cannot rest on disk on {sys.platform}"
            raise PlanError(text, fix="train on Linux, or name no folder", location=location)
        self._folder, self._nbytes, self._location = folder, nbytes, location
        text = f"a file of {format_nbytes(nbytes)} cannot be made"
        try:
            file = TemporaryFile(buffering=0, dir=folder)  # noqa: SIM115  close() closes it
        except OSError as error:
            self._raise(text, error)
        self._descriptor, self._close_file = file.fileno(), finalize(self, file.close)
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes)
            self._map = mmap.mmap(self._descriptor, nbytes)
            self.is_direct = _pass_by_page_cache(self._descriptor)
        except OSError as error:
            self._close_file()
            self._raise(text, error)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        if not self.is_direct:
            text = "the file system of '%s' cannot pass by the page cache (O_DIRECT): reads and writes take "
            logger.warning(text + "memory of the host while they last", folder)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rank-file")

    def start_read(
        self, begin: int, target: torch.Tensor, action: str, after: Callable[[], None] | None = None
    ) -> Work:
        """Starts to read the bytes from `begin` on into `target`: page-aligned bytes, whole blocks.

        The thread of the file calls `after` first, which returns when `target` may be overwritten.
        """
        return self._start(begin, target, action, after, writes=False)

    def start_write(
        self, begin: int, source: torch.Tensor, action: str, after: Callable[[], None] | None = None
    ) -> Work:
        """Starts to write `source`, likewise; `after` returns when all of it is there."""
        return self._start(begin, source, action, after, writes=True)

    def grow(self, nbytes: int) -> None:
        """Makes the file at least `nbytes` long, whole blocks; what is new is not in `tensor`."""
        if nbytes <= self._nbytes:
            return
        try:
            os.posix_fallocate(self._descriptor, self._nbytes, nbytes - self._nbytes)
        except OSError as error:
            self._raise(f"a file of {format_nbytes(nbytes)} cannot be made", error)
        self._nbytes = nbytes

    def drop_cache(self) -> None:
        """Writes mapped pages back and removes them from memory; nothing may be under way."""
        try:
            self._map.flush()
            self._map.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._raise("initial values cannot be written to the file", error)

    def close(self) -> None:
        """Waits for what is under way; the file is removed once nobody holds `tensor`."""
        self._thread.shutdown()
        self._close_file()

    def _start(
        self, begin: int, tensor: torch.Tensor, action: str, after: Callable[[], None] | None, *, writes: bool
    ) -> Work:
        def run() -> None:
            if after is not None:
                after()
            self._transfer(begin, tensor, action, writes=writes)

        return FileWork(self._thread.submit(run))

    def _transfer(self, begin: int, tensor: torch.Tensor, action: str, *, writes: bool) -> None:
        """Moves all bytes of `tensor`, however few the system moves at a time (at most 2 GiB)."""
        data, done = tensor.numpy().data, 0
        transfer = os.pwritev if writes else os.preadv
        try:
            while done < len(data):
                moved = transfer(self._descriptor, [data[done:]], begin + done)
                if not moved:
                    raise OSError(errno.EIO, "the file has ended")
                done += moved
            if not self.is_direct:
                if writes:
                    os.fdatasync(self._descriptor)  # only pages that are written leave the cache
                os.posix_fadvise(self._descriptor, begin, len(data), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._raise(f"{action} failed at byte {begin + done} of the file", error)

    def _raise(self, text: str, error: OSError) -> NoReturn:
        raise _folder_error(text, self._folder, error, self._location) from error


def free_disk_nbytes(folder: str) -> int:
    """Returns the bytes that are free on the disk of `folder`. Raises PlanError if there is none."""
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise _folder_error("no file can be made", folder, error) from error


def _folder_error(text: str, folder: str, error: OSError, location: str = LOCATION) -> PlanError:
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    text = f"{text} in '{folder}': {error.strerror} ({name})"
    return PlanError(text, fix=FIXES.get(code, OTHER_FIX), location=location)


def load_pages(tensor: torch.Tensor, *, writes: bool = False) -> None:
    """Brings the memory of `tensor`, which may be mapped from a file, into memory; to be written if `writes`.

    Raises PlanError where the file cannot be read. Does nothing on systems that cannot be asked for that.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.numel():
        return
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    nbytes = tensor.data_ptr() + extent * tensor.element_size() - begin
    advice = MADV_POPULATE_WRITE if writes else MADV_POPULATE_READ
    # reading it would raise SIGBUS; other errors: the system cannot tell
    if advise_kernel(begin, nbytes, advice) == errno.EFAULT:
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        text = f"{format_nbytes(nbytes)} that rest on disk cannot be {'written' if writes else 'read'}"
        text = f"{text}: {error.strerror} (EIO)"
        raise PlanError(text, fix=FIXES[errno.EIO], location=LOCATION) from error


def _pass_by_page_cache(descriptor: int) -> bool:
    """Makes reads and writes pass by the page cache; returns whether one block can be read so."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(descriptor, [mmap.mmap(-1, FILE_BLOCK_NBYTES)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True
