"""The status of one rank in a hang: where it is, what it waits for, what it issued last.

A rank's watchdog thread makes the status, so it works while the main thread computes, sleeps, loops or waits.
It consists of plain text and numbers, sent as JSON. A rank whose interpreter cannot answer is observed from
outside (process_probe.py).
"""

import json
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, Self

import torch

from meshwright.comm.collectives.flight_recorder import LIBRARY_PATHS, IssuedCollective

RankCondition = Literal["responding", "exited", "silent", "stopped", "dead"]
StackFrame = tuple[str, int, str]  # file, line, function

PACKAGE_PATH = str(Path(__file__).parents[2]) + os.sep
STDLIB_PATHS = tuple(
    {path + os.sep for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))}
)
SITE_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
C10D_FILE = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
MAX_FRAMES = 40  # of a stack, the innermost


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


def is_library(file: str) -> bool:
    """Returns whether a source file belongs to this package, to Python or to an installed one.

    Not to the user.
    """
    return file.startswith((PACKAGE_PATH, *STDLIB_PATHS, "<")) or any(part in file for part in SITE_PACKAGES)
