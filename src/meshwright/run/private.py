"""A folder for temporary files that does not outlive its process for long, even if that process is killed.

A temporary folder is removed by the process that made it, so one that is killed leaves it behind. Here the owner holds a
lock on a file in it, and the system lets go of the lock when the process ends, however it ends. Whoever makes the next
folder first removes those whose lock is free.

    meshwright-k3x1/   lock  store        lock held: its job runs          lock free: its job was killed; removed
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "meshwright-", "lock"


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new temporary folder that only this user can read; it is gone afterwards, and so are those of killed processes."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        lock = Path(name) / LOCK
        part = lock.with_suffix(".part")
        with part.open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            part.rename(lock)  # held before others can see it
            yield lock.parent


def _remove_abandoned() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError):  # its owner lives and holds the lock, or it is another user's, or just gone
            if lock.parent.lstat().st_uid != os.getuid():
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent)
