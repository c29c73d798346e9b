"""What a rank says of itself when somebody waits in vain: where it is, what it waits for, what it issued last.

A statement is made by the rank itself, by a thread that does not need the main one: also while the main thread computes, sleeps,
loops or waits. What is in it is plain text and numbers, sent as JSON.

A rank whose interpreter cannot answer (native code that holds the lock, a stopped process) is looked at from outside: a signal
has Python's fault handler write the stack of the main thread, which needs no lock, and the ring of its last collectives lies in
memory that others may read (comm/recent.py). Both need the same host and the same user.
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
from meshwright.comm.watchdog.host import HostProcess, host_id

RankCondition = Literal["answers", "left", "silent", "stopped", "gone"]
StackFrame = tuple[str, int, str]  # file, line, function

PACKAGE_PATH = str(Path(__file__).parents[2]) + os.sep
STDLIB_PATHS = tuple(
    {path + os.sep for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
)
SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
C10D_FILE = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
MAX_FRAMES = 40  # frames of a stack that are told
SIGNAL_TIMEOUT_S = 0.5  # for a fault handler to write


@dataclass(frozen=True)
class PendingWait:
    """A wait for other ranks: for the collective of that `order` in the ring, for so many seconds."""

    sequence_id: int
    seconds: float


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank. `stack` is that of its main thread, the innermost frame last.

    `error` is what it left with, `own` whether that is not merely the consequence of another rank's failure.
    """

    rank: int
    condition: RankCondition = "answers"
    phase: str = ""
    step: int | None = None
    collectives: tuple[IssuedCollective, ...] = ()
    waits: tuple[PendingWait, ...] = ()
    stack: tuple[StackFrame, ...] = ()
    error: str = ""
    is_root_cause: bool = False
    time_s: float = 0.0

    def to_json(self) -> str:
        """The statement as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The statement that `as_json` wrote."""
        said = json.loads(text)
        recent = tuple(
            IssuedCollective(order, number, tuple(axes), what, action, place, tuple(pair), tuple(among))
            for order, number, axes, what, action, place, pair, among in (
                each.values() for each in said.pop("recent")
            )
        )
        waits = tuple(PendingWait(**each) for each in said.pop("waits"))
        return cls(
            **said
            | {"recent": recent, "waits": waits, "stack": tuple((f, n, w) for f, n, w in said["stack"])}
        )

    def awaited_collective(self) -> IssuedCollective | None:
        """The collective that this rank waits for, the oldest if there are several."""
        waiting = {wait.sequence_id for wait in self.waits}
        return next((issued for issued in self.collectives if issued.sequence_id in waiting), None)

    def waited_s(self, issued: IssuedCollective) -> float:
        """How long it has waited for `issued`."""
        return max(
            (wait.seconds for wait in self.waits if wait.sequence_id == issued.sequence_id), default=0.0
        )

    def last_collective(self, channel: tuple[object, ...]) -> IssuedCollective | None:
        """The newest collective of `line` that it issued."""
        return next((issued for issued in reversed(self.collectives) if issued.channel == channel), None)

    def find_collective(self, channel: tuple[object, ...], number: int) -> IssuedCollective | None:
        """The `number`-th collective of `line`, if it is still in the ring."""
        return next(
            (issued for issued in self.collectives if issued.channel == channel and issued.number == number),
            None,
        )

    def location(self) -> str:
        """Where it stands, as `file:line in function`: the innermost line of the user's own code, else of other code."""
        frame = user_frame(self.stack)
        return "" if frame is None else f"{frame[0]}:{frame[1]} in {frame[2]}"

    def foreign_collective(self) -> str:
        """The function of torch.distributed that it is in, though it waits in no collective of ours; "" for none."""
        names = [function for file, _, function in self.stack if file == C10D_FILE and function != "wrapper"]
        return names[0] if names and not self.waits else ""


def user_frame(stack: Sequence[StackFrame]) -> StackFrame | None:
    """The frame of a stack (innermost last) that a user looks for first."""
    own = [frame for frame in stack if not is_library(frame[0])]
    if own:
        return own[-1]
    others = [frame for frame in stack if not frame[0].startswith((*LIBRARY_PATHS, *STDLIB_PATHS, "<"))]
    return others[-1] if others else None


def frames_from(frame: FrameType | None) -> tuple[StackFrame, ...]:
    """The stack that ends in `frame`, its innermost frames."""
    found: list[StackFrame] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(reversed(found))


def traceback_frames(trace: TracebackType | None) -> tuple[StackFrame, ...]:
    """The frames of a traceback, the one that raised last."""
    found: list[StackFrame] = []
    while trace is not None:
        found.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_code.co_name))
        trace = trace.tb_next
    return tuple(found[-MAX_FRAMES:])


def main_thread_stack() -> tuple[StackFrame, ...]:
    """The stack of the main thread of this process, whichever thread asks."""
    return frames_from(sys._current_frames().get(threading.main_thread().ident or 0))


@dataclass(frozen=True)
class ProcessProbe:
    """How a rank can be looked at from its own host: the process, the descriptors of its ring and of its stack (None: none).

    `host` names the host until its next start, and the space of process numbers; `born` is when the process started.
    """

    host_id: str
    pid: int
    start_time: int
    recorder_fd: int | None = None
    stack_fd: int | None = None

    def is_alive(self) -> bool:
        """Whether that process still runs."""
        return HostProcess(self.pid, self.start_time).is_running

    def condition(self) -> RankCondition:
        """Of one that does not answer: gone, stopped (by SIGSTOP, Ctrl-Z, a debugger), or there and silent."""
        process = HostProcess(self.pid, self.start_time)
        return "stopped" if process.is_stopped else "silent" if process.is_running else "gone"

    def stack(self) -> tuple[StackFrame, ...]:
        """The stack of its main thread, written by its fault handler; empty when nothing came."""
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
    """The frames in what Python's fault handler wrote (innermost first), innermost last."""
    found: list[StackFrame] = []
    for line in text.splitlines():
        file, mark, rest = line.strip().removeprefix('File "').partition('", line ')
        row, _, function = rest.partition(" in ")
        if mark and row.isdigit():
            found.append((file, int(row), function))
    return tuple(reversed(found))


class ProbeTarget:
    """Lets others look at this process from outside until `close`: where the system can, and nobody else uses the signal."""

    def __init__(self, recorder_fd: int | None) -> None:
        self._recorder_fd, self._file = recorder_fd, None
        if sys.platform == "linux" and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by close(); it has no name
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=False)
        stack_fd = None if self._file is None else self._file.fileno()
        own = HostProcess.current()
        self.probe = ProcessProbe(host_id(), own.pid, own.start_time, recorder_fd, stack_fd)

    def close(self) -> None:
        """Let go of the signal and of the descriptors."""
        if self._file is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._file.close()
        if self._recorder_fd is not None:
            os.close(self._recorder_fd)
        self._recorder_fd = self._file = None


def is_library(file: str) -> bool:
    """Whether a source file is this package's, Python's own or an installed one: not the user's."""
    return file.startswith((PACKAGE_PATH, *STDLIB_PATHS, "<")) or any(part in file for part in SITE_PACKAGES)
