"""Records how a rank failed, and ends it.

When one rank fails, its peers fail next, inside a collective, with a message about a closed connection. A
terminal full of such messages hides the one that matters. So no rank prints its own failure:
`record_failure` writes it to a file,

    attempts/0003/failures/rank-1.json    {"rank": 1, "kind": "error", "step": 12, "phase": "backward", ...}

in the folder of the attempt: the ranks of an earlier attempt may still be ending. A record has one of four
kinds, and the launcher shows the first that is not the consequence of another:

    error        an exception of this rank
    hang         a collective that did not complete, with its hang report: shown when no rank has an error
    lost_peer    a collective that broke because a peer was gone
    plan_error   a PlanError: every rank raises the same
"""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from meshwright.plan.job.errors import PEER_LOST_PATTERN, CollectiveError, PlanError
from meshwright.run.launch.parent_death import end_with_parent

FailureKind = Literal["error", "hang", "lost_peer", "plan_error"]
# the base of torch's errors of backends, networks and stores; by name: launching never imports torch
PEER_TYPE = "DistError"


@dataclass
class RankProgress:
    """The step and phase of a rank: set by the training loop, named in the record of a failure.

    `attempt_folder` is set by a rank that learns only after its start which attempt it belongs to.
    """

    step: int | None = None
    phase: str = ""
    attempt_folder: Path | None = None


@dataclass(frozen=True)
class FailureRecord:
    """The failure of a rank. `time` is in seconds since the epoch; `traceback` is the full text, chained
    errors included.
    """

    rank: int
    time: float
    kind: FailureKind
    type: str
    message: str
    traceback: str
    step: int | None = None
    phase: str = ""

    def write(self, folder: Path) -> None:
        """Writes this record to `folder`/failures, atomically."""
        path = failure_path(folder, self.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="ascii")
        part.replace(path)


def failure_path(folder: Path, rank: int) -> Path:
    """Returns the file in which `rank` records its failure."""
    return folder / "failures" / f"rank-{rank}.json"


def read_failures(folder: Path) -> dict[int, FailureRecord]:
    """Returns the records in `folder`/failures, by rank."""
    found = (
        FailureRecord(**json.loads(path.read_text(encoding="ascii")))
        for path in (folder / "failures").glob("rank-*.json")
    )
    return {record.rank: record for record in found}


@contextmanager
def record_failure(
    rank: int, folder: Path, lifeline_fd: int | None = None, show: Callable[[str], None] | None = None
) -> Iterator[RankProgress]:
    """Runs the body of one rank and records an exception; yields the RankProgress to update.

    An exception in the body is written to `folder`/failures (`folder` is that of the attempt) and ends the
    process with code 1, without output on the terminal. With `lifeline_fd` the process ends when the
    launching process is gone. `show` is for a rank whose launcher reads no records: it is called with the
    text of a failure, and a PlanError is raised.
    """
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a crash in native code leaves the Python line in the log
    if lifeline_fd is not None:
        end_with_parent(lifeline_fd)
    progress = RankProgress()
    try:
        yield progress
    except Exception as error:
        if show is not None and isinstance(error, PlanError):
            raise
        record, folder = _record(rank, error, progress), progress.attempt_folder or folder
        try:
            record.write(folder)
        except OSError as unwritable:  # a full disk, say: then the terminal is better than silence
            error.add_note(f"This could not be written to {failure_path(folder, rank)}: {unwritable}")
            raise error from error.__cause__
        if show is not None:
            is_full = record.kind == "error" or (record.kind == "hang" and _shows_report(error))
            reason = "it timed out" if record.kind == "hang" else "it lost a peer"
            show(
                describe_failure(record)
                if is_full
                else f"{_headline(record)}: {reason}; see {failure_path(folder, rank)}"
            )
        # Not sys.exit: threads and communicators that wait for a lost peer would keep the process from
        # ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def describe_failure(record: FailureRecord) -> str:
    """Returns the failure as text: step, phase and traceback; for a hang, its report."""
    if record.kind == "hang":
        return f"{_headline(record, 'timed out waiting')}\n{record.message}"
    return f"{_headline(record)}\n{record.traceback.rstrip()}"


def _headline(record: FailureRecord, what: str = "failed") -> str:
    step = "" if record.step is None else f" at step {record.step}"
    return f"rank {record.rank} {what}{step}{f' ({record.phase})' if record.phase else ''}"


def failure_kind(error: BaseException) -> FailureKind:
    """Returns the kind of failure of `error`. An error raised `from` a broken collective has the kind of the
    collective.
    """
    if isinstance(error, PlanError):
        return "plan_error"
    for cause in _causes(error):
        if isinstance(cause, CollectiveError) and cause.report:
            return "hang"
        names = {kind.__name__ for kind in type(cause).__mro__}
        if PEER_TYPE in names or (type(cause) is RuntimeError and PEER_LOST_PATTERN.search(str(cause))):
            return "lost_peer"
    return "error"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _shows_report(error: BaseException) -> bool:
    """Whether this rank is the one, among those with the same hang report, that shows it."""
    return any(
        isinstance(cause, CollectiveError) and cause.report and cause.is_reporter for cause in _causes(error)
    )


def _record(rank: int, error: Exception, progress: RankProgress) -> FailureRecord:
    here = error.__traceback__
    trace = (
        here.tb_next if here is not None and here.tb_next is not None else here
    )  # leave out the line of guard itself
    text = "".join(traceback.format_exception(type(error), error, trace))
    return FailureRecord(
        rank,
        time.time(),
        failure_kind(error),
        type(error).__name__,
        str(error),
        text,
        progress.step,
        progress.phase,
    )
