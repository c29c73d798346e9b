"""Claims the folder of a run for one attempt, so that two runs never write into one folder.

Schedulers do start a job twice. Two runs in one folder append to one metrics file and remove each other's
partial checkpoints. So whoever starts ranks first claims the folder, and holds it until the ranks have ended:

    attempts/0003/owner.json              the attempt that holds the folder: host, process, start; its
                                          modification time is renewed every `RENEW_S`
    attempts/0002/former_owner.json       an attempt that has ended, or whose owner was killed
    attempts/0002/failures/rank-1.json    how a rank of it failed

Attempts are numbered, and an attempt is claimed by renaming a prepared folder to the next number. A rename
replaces no folder with contents, on local and on network file systems, so of several claims one succeeds. A
number is never given twice, because its folder keeps contents. With one lock file, or with numbers that are
given again, a slow process could take away a claim that is newer than the one it found to have ended.

The claim of the newest number holds the folder until its owner.json is renamed, or its owner is dead:

    on this host      its process has ended (compared by pid and start time, because pids are reused)
    on another host   owner.json was not renewed for `SILENT_S`. Only changes are compared, no clocks.

The next claim then takes over and renames the dead owner's file. An owner that was only suspended misses its
file when it goes on, and ends at once: `os._exit` closes the lifeline of its ranks.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from meshwright.comm.watchdog.process_identity import HostProcess, host_id
from meshwright.plan.job.errors import PlanError, refuse_special_files, refuse_write_errors
from meshwright.plan.job.file_format import RUN_OWNER

ATTEMPTS = "attempts"
UNCLAIMED = "unclaimed"  # failures of ranks of another launcher that rank 0 has not told their attempt
OWNER_FILE, FORMER_OWNER_FILE = "owner.json", "former_owner.json"
RENEW_S = 5.0  # how often an owner renews its claim
SILENT_S = 30.0  # after which an owner on another host is dead: six renewals
POLL_S = 0.2
# what a run reads or appends to in its folder; checkpoints check their own files
RUN_FILES = (
    *("*.json", "*.jsonl", "*.toml", "logs/*.log", "ranks/*.json", "trace/*.json", "trackers/*"),
    *("checkpoints/*.json", "checkpoints/*.part"),
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempt:
    """One attempt of the run in `run_folder`, by its number from 1 up."""

    run_folder: Path
    number: int

    @property
    def folder(self) -> Path:
        """The folder of this attempt; the failures of its ranks are recorded in it."""
        return self.run_folder / ATTEMPTS / f"{self.number:04d}"


@dataclass(frozen=True)
class Owner:
    """The process that claimed an attempt: `host_id` says where its pid is valid, `since` is in seconds since
    the epoch.
    """

    host: str
    host_id: str
    pid: int
    start_time: int
    since: float

    @classmethod
    def current(cls) -> "Owner":
        """Returns this process."""
        own = HostProcess.current()
        return cls(socket.gethostname(), host_id(), own.pid, own.start_time, time.time())

    @classmethod
    def from_json(cls, text: bytes) -> "Owner | None":
        """Returns the owner that was written as JSON; None for anything else."""
        with suppress(ValueError, TypeError, KeyError, OverflowError, OSError, PlanError):
            said = RUN_OWNER.contents(json.loads(text), OWNER_FILE)
            datetime.fromtimestamp(float(said["since"]))  # raises for a time that is none
            return cls(
                str(said["host"]),
                str(said["host_id"]),
                int(said["pid"]),
                int(said["start_time"]),
                float(said["since"]),
            )
        return None

    @property
    def is_local(self) -> bool:
        """Whether its process can be seen from here."""
        return self.host_id != "" and self.host_id == host_id()

    def __str__(self) -> str:
        started = datetime.fromtimestamp(self.since).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        return f"process {self.pid} on host {self.host}, since {started}"


@contextmanager
def claim_run_folder(folder: Path) -> Iterator[Attempt]:
    """Yields the attempt by which this process holds `folder`, a run's, until the body ends.

    Raises PlanError when a living process holds it, with the owner and since when; when the folder cannot be
    written to; and when a file that a run opens there is no regular file.
    """
    fix = "name a folder that can be written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"the folder '{folder}' cannot be made: {error.strerror}"
        raise PlanError(text, fix=fix, location="run.folder") from error
    refuse_special_files(
        (path for pattern in RUN_FILES for path in sorted(folder.glob(pattern))),
        "move it away, or train into another folder: run.folder",
    )
    with refuse_write_errors("the claim of a run", folder / ATTEMPTS, f"{fix}: run.folder"):
        attempt = _claim(folder)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(attempt, ended), daemon=True, name="run folder")
    thread.start()
    try:
        yield attempt
    finally:
        ended.set()
        thread.join()
        _end(attempt)


def newest_attempt(folder: Path) -> Attempt | None:
    """Returns the newest attempt of the run in `folder`; None if it was never claimed."""
    number = max(_attempt_numbers(folder), default=0)
    return Attempt(folder, number) if number else None


def is_running(attempt: Attempt) -> bool:
    """Returns whether the owner of `attempt` is alive, for those who only look: an owner on another host is
    taken to be alive if it has renewed its claim within `SILENT_S`, by the clock of this host.
    """
    path = attempt.folder / OWNER_FILE
    modified_ns = _modified_ns(path)
    if modified_ns is None:
        return False
    try:
        owner = Owner.from_json(path.read_bytes())
    except FileNotFoundError:
        return False
    if owner is not None and owner.is_local:
        return HostProcess(owner.pid, owner.start_time).is_running
    return time.time() - modified_ns * 1e-9 < SILENT_S


def _claim(folder: Path) -> Attempt:
    prepared = folder / ATTEMPTS / f".claim-{secrets.token_hex(4)}"
    prepared.mkdir(parents=True)
    try:
        (prepared / OWNER_FILE).write_text(
            json.dumps(RUN_OWNER.header | asdict(Owner.current())) + "\n", encoding="utf-8"
        )
        while True:
            newest = Attempt(folder, max(_attempt_numbers(folder), default=0))
            if newest.number:
                _refuse_living_owner(newest)
            mine = Attempt(folder, newest.number + 1)
            if _rename_to_new(prepared, mine.folder):  # else another process was faster: it is the newest now
                for number in range(1, mine.number):  # whose owners are dead
                    _end(Attempt(folder, number))
                return mine
    finally:
        shutil.rmtree(prepared, ignore_errors=True)


def _attempt_numbers(folder: Path) -> list[int]:
    inside = (folder / ATTEMPTS).glob("*")  # nothing, if the folder was never claimed
    return [int(path.name) for path in inside if path.name.isdecimal()]


def _rename_to_new(source: Path, target: Path) -> bool:
    """Renames a folder; returns False if there is a folder with contents at `target`."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


def _refuse_living_owner(attempt: Attempt) -> None:
    path = attempt.folder / OWNER_FILE
    modified_ns = _modified_ns(path)
    if modified_ns is None:
        return  # it has ended
    try:
        owner = Owner.from_json(path.read_bytes())
    except FileNotFoundError:
        return  # it has ended just now
    if owner is not None and owner.is_local:
        if not HostProcess(owner.pid, owner.start_time).is_running:
            return
    elif not _is_renewed(path, modified_ns, owner):
        return
    kill = "end it" if owner is None else f"end it (kill {owner.pid} on host {owner.host})"
    raise PlanError(
        f"another run trains in this folder: attempt {attempt.number}, {owner or 'by a process unknown'}",
        fix=f"wait until it has ended, or {kill}, or train into another folder: --run.folder",
        location=str(attempt.run_folder),
    )


def _is_renewed(path: Path, modified_ns: int, owner: Owner | None) -> bool:
    logger.warning(
        "%s is held by %s: waiting up to %g s to see whether it is alive",
        path.parent,
        owner or "a process unknown",
        SILENT_S,
    )
    end = time.monotonic() + SILENT_S
    while time.monotonic() < end:
        time.sleep(POLL_S)
        now_ns = _modified_ns(path)
        if now_ns != modified_ns:
            return now_ns is not None
    return False


def _modified_ns(path: Path) -> int | None:
    """The modification time of a regular file; None without one. Opening it makes NFS ask the server."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _renew(attempt: Attempt, ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        try:
            os.utime(attempt.folder / OWNER_FILE)
        except FileNotFoundError:
            logger.error(
                "the claim of attempt %d in '%s' is gone: another run took over, because this one was silent "
                "for %g s, or the folder was removed. This run ends; it resumes with the same command",
                *(attempt.number, attempt.run_folder, SILENT_S),
            )
            os._exit(1)
        except OSError as error:  # the disk may be back before the silence is long enough
            logger.warning("the claim of '%s' was not renewed: %s", attempt.run_folder, error)


def _end(attempt: Attempt) -> None:
    """Gives the claim up. The file stays under another name, so that the number is not given again."""
    with suppress(OSError):  # it has ended already, or the folder was removed
        (attempt.folder / OWNER_FILE).rename(attempt.folder / FORMER_OWNER_FILE)
