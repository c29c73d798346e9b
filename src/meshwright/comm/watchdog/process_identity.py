"""Identifies hosts and processes.

A host id that its processes share, and processes that survive reuse of their pid.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


@dataclass(frozen=True)
class HostProcess:
    """A process of this host: its pid, and its start time in ticks since boot (pids are reused)."""

    pid: int
    start_time: int

    @classmethod
    def current(cls) -> Self:
        """Returns this process."""
        number = os.getpid()
        return cls(number, _process_status(number)[0])

    @property
    def is_running(self) -> bool:
        """Whether it is still running; a zombie is not."""
        return self._state() not in ("", "dead")

    @property
    def is_stopped(self) -> bool:
        """Whether it is suspended until SIGCONT."""
        return self._state() == "stopped"

    def _state(self) -> str:
        """runs, stopped or dead; "" when there is no such process."""
        try:
            started, state = _process_status(self.pid)
        except (OSError, psutil.Error):
            return ""
        return state if started == self.start_time else ""


def host_id() -> str:
    """Returns an id that two processes share when one can see the other under /proc.

    "" where that is unknown.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = (
            os.readlink("/proc/self/ns/pid"),
            os.readlink("/proc/thread-self/ns/net"),
        )  # with another network: another host
        return boot + "".join(spaces)
    return ""


def _process_status(pid: int) -> tuple[int, str]:
    """The start time of a process, and whether it runs, is stopped or dead.

    Raises OSError or psutil.Error without one.
    """
    if sys.platform != "linux":
        process = psutil.Process(pid)
        states = {psutil.STATUS_ZOMBIE: "dead", psutil.STATUS_DEAD: "dead", psutil.STATUS_STOPPED: "stopped"}
        return int(process.create_time()), states.get(process.status(), "runs")
    # the fields behind the name, which may hold anything: first the state; the 20th is the start
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[19]), {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(fields[0], "runs")
