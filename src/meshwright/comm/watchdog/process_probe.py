"""Observes the process of a rank from outside, when its interpreter cannot answer.

Native code may hold the GIL, or the process may be stopped. On a signal, Python's fault handler writes the
stack of the main thread, which needs no lock, and the flight recorder is in memory that others may read. Both
need the same host and the same user.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass

from meshwright.comm.watchdog.process_identity import HostProcess, host_id
from meshwright.comm.watchdog.rank_status import RankCondition, StackFrame

SIGNAL_TIMEOUT_S = 0.5  # for a fault handler to write


@dataclass(frozen=True)
class ProcessProbe:
    """The process of a rank, for observation from its host.

    `pid` and the descriptors of its ring and of its stack. `host_id` identifies the host and its pid
    namespace; `start_time` is when the process started.
    """

    host_id: str
    pid: int
    start_time: int
    recorder_fd: int | None = None
    stack_fd: int | None = None

    def is_alive(self) -> bool:
        """Returns whether that process is still running."""
        return HostProcess(self.pid, self.start_time).is_running

    def condition(self) -> RankCondition:
        """Returns the condition of a rank that does not answer.

        Dead, stopped (SIGSTOP, a debugger), or silent.
        """
        process = HostProcess(self.pid, self.start_time)
        return "stopped" if process.is_stopped else "silent" if process.is_running else "dead"

    def stack(self) -> tuple[StackFrame, ...]:
        """Returns the stack of its main thread, written by its fault handler; empty without an answer."""
        if self.stack_fd is None or not self.is_alive():
            return ()
        path = f"/proc/{self.pid}/fd/{self.stack_fd}"
        try:
            before = os.stat(path).st_size
            os.kill(self.pid, signal.SIGUSR2)
            end = time.monotonic() + SIGNAL_TIMEOUT_S
            while time.monotonic() < end and os.stat(path).st_size == before:
                time.sleep(0.02)
            time.sleep(0.02)
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(before)
                return parse_faulthandler_stack(file.read())
        except OSError:
            return ()


def parse_faulthandler_stack(text: str) -> tuple[StackFrame, ...]:
    """Returns the frames in the output of Python's fault handler (innermost first), innermost last."""
    found: list[StackFrame] = []
    for line in text.splitlines():
        file, mark, rest = line.strip().removeprefix('File "').partition('", line ')
        row, _, function = rest.partition(" in ")
        if mark and row.isdigit():
            found.append((file, int(row), function))
    return tuple(reversed(found))


class ProbeTarget:
    """Lets others observe this process from outside until `close`.

    Where the system can and the signal is free.
    """

    def __init__(self, recorder_fd: int | None) -> None:
        self._recorder_fd, self._file = recorder_fd, None
        if sys.platform == "linux" and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by close(); it has no name
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=False)
        stack_fd = None if self._file is None else self._file.fileno()
        own = HostProcess.current()
        self.probe = ProcessProbe(host_id(), own.pid, own.start_time, recorder_fd, stack_fd)

    def close(self) -> None:
        """Releases the signal and the descriptors."""
        if self._file is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._file.close()
        if self._recorder_fd is not None:
            os.close(self._recorder_fd)
        self._recorder_fd = self._file = None
