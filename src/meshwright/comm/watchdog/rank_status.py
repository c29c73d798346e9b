"""The status of one rank in a hang: where it is, what it waits for, what it issued last.

A rank's watchdog thread makes the status, so it works while the main thread computes, sleeps, loops or waits.
It consists of plain text and numbers, sent as JSON.

A rank whose interpreter cannot answer (native code that holds the GIL, a stopped process) is observed from
outside: on a signal, Python's fault handler writes the stack of the main thread, which needs no lock, and the
flight recorder is in memory that others may read. Both need the same host and the same user.
"""

import faulthandler
import json
import os
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Self

import torch

from meshwright.comm.collectives.flight_recorder import LIBRARY_PATHS, IssuedCollective
from meshwright.comm.watchdog.process_identity import HostProcess, host_id

RankCondition = Literal["responding", "exited", "silent", "stopped", "dead"]
StackFrame = tuple[str, int, str]  # file, line, function

PACKAGE_PATH = str(Path(__file__).parents[2]) + os.sep
STDLIB_PATHS = tuple(
    {path + os.sep for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
)
SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
C10D_FILE = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
MAX_FRAMES = 40  # of a stack, the innermost
SIGNAL_TIMEOUT_S = 0.5  # for a fault handler to write


@dataclass(frozen=True)
class PendingWait:
    """A wait for the collective with this `sequence_id`, since `seconds`."""

    sequence_id: int
    seconds: float


@dataclass(frozen=True)
class RankStatus:
    """The status of one rank. `stack` is that of its main thread, the innermost frame last.

    `error` is what it exited with; `is_root_cause` is False if that only follows from another rank's failure.
    """

    rank: int
    condition: RankCondition = "responding"
    phase: str = ""
    step: int | None = None
    collectives: tuple[IssuedCollective, ...] = ()
    waits: tuple[PendingWait, ...] = ()
    stack: tuple[StackFrame, ...] = ()
    error: str = ""
    is_root_cause: bool = False
    time_s: float = 0.0

    @property
    def is_unresponsive(self) -> bool:
        """Whether its process may still run, and its watchdog did not answer."""
        return self.condition in ("silent", "stopped")

    def to_json(self) -> str:
        """Returns the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the status that `to_json` wrote."""
        fields = json.loads(text)
        collectives = tuple(
            IssuedCollective(**each | {key: tuple(each[key]) for key in ("axes", "pair", "member_indices")})
            for each in fields.pop("collectives")
        )
        waits = tuple(PendingWait(**each) for each in fields.pop("waits"))
        stack = tuple((file, line, function) for file, line, function in fields.pop("stack"))
        return cls(**fields, collectives=collectives, waits=waits, stack=stack)

    def awaited_collective(self) -> IssuedCollective | None:
        """Returns the collective that this rank waits for, the oldest if there are several."""
        waiting = {wait.sequence_id for wait in self.waits}
        return next((issued for issued in self.collectives if issued.sequence_id in waiting), None)

    def waited_s(self, issued: IssuedCollective) -> float:
        """Returns how long it has waited for `issued`."""
        return max(
            (wait.seconds for wait in self.waits if wait.sequence_id == issued.sequence_id), default=0.0
        )

    def last_collective(self, channel: tuple[object, ...]) -> IssuedCollective | None:
        """Returns the newest collective of `channel` that it issued."""
        return next((issued for issued in reversed(self.collectives) if issued.channel == channel), None)

    def find_collective(self, channel: tuple[object, ...], number: int) -> IssuedCollective | None:
        """Returns the `number`-th collective of `channel`, if it is still in the ring."""
        return next(
            (issued for issued in self.collectives if issued.channel == channel and issued.number == number),
            None,
        )

    def location(self) -> str:
        """Returns `file:line in function`: the innermost line of the user's own code, else of other code."""
        frame = user_frame(self.stack)
        return "" if frame is None else f"{frame[0]}:{frame[1]} in {frame[2]}"

    def foreign_collective(self) -> str:
        """Returns the function of torch.distributed that it is in without a collective of this library.

        "" for none.
        """
        names = [function for file, _, function in self.stack if file == C10D_FILE and function != "wrapper"]
        return names[0] if names and not self.waits else ""


def user_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """Returns the innermost frame of the user's own code in a stack (innermost last)."""
    own = [frame for frame in stack if not is_library(frame[0])]
    if own:
        return own[-1]
    others = [frame for frame in stack if not frame[0].startswith((*LIBRARY_PATHS, *STDLIB_PATHS, "<"))]
    return others[-1] if others else None


def frames_from(frame: FrameType | None) -> tuple[StackFrame, ...]:
    """Returns the stack that ends in `frame`, at most its innermost `MAX_FRAMES` frames."""
    found: list[StackFrame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def traceback_frames(trace: TracebackType | None) -> tuple[StackFrame, ...]:
    """Returns the frames of a traceback, the one that raised last."""
    found: list[StackFrame] = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return tuple(found[-MAX_FRAMES:])


def main_thread_stack() -> tuple[StackFrame, ...]:
    """Returns the stack of the main thread of this process; any thread may ask."""
    return frames_from(sys._current_frames().get(threading.main_thread().ident or 0))


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


def is_library(file: str) -> bool:
    """Returns whether a source file belongs to this package, to Python or to an installed one.

    Not to the user.
    """
    return file.startswith((PACKAGE_PATH, *STDLIB_PATHS, "<")) or any(part in file for part in SITE_PACKAGES)
