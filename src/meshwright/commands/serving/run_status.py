"""What a run in a folder does: whether its ranks live, when its last step ended, and how it failed."""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from statistics import median

from meshwright.report.html.board_page import RunStatus
from meshwright.report.timeline.run_folder_reader import RunRecord
from meshwright.run.launch.failure_record import FailureRecord, describe_failure, read_failures
from meshwright.run.launch.run_folder import ATTEMPTS, UNCLAIMED, is_running, newest_attempt

METRICS_FILE = "metrics.jsonl"
# what pages show of a run
SHOWN_FILES = (METRICS_FILE, "run_info.json", "plan.toml", "ranks/*.json", "trace/*.json")
SHOWN_ATTEMPTS = (f"{ATTEMPTS}/*/owner.json", f"{ATTEMPTS}/*/failures/*.json")
USUAL_STEPS = 20  # whose median is the usual time of a step
LATE_FACTOR, LATE_S = 20, 60  # of usual steps, and at least so long: then a step is late


def run_status(folder: Path, record: RunRecord) -> RunStatus:
    """Returns what the run in `folder` does, of which `record` was read."""
    attempt, version = newest_attempt(folder), files_version([folder])
    step, steps = record.steps[-1]["step"] if record.steps else 0, record.settings.get("train.steps")
    at = f"step {step:,}" + (f" of {steps:,}" if isinstance(steps, int) else "")
    since, usual = _since_last_step_s(folder), _usual_step_s(record)
    is_late = since is not None and usual is not None and since > max(LATE_S, LATE_FACTOR * usual)
    # ranks of another launcher claim no folder: whether they live, their steps alone tell
    lives = is_running(attempt) if attempt is not None else since is not None and not is_late
    done = isinstance(steps, int) and step >= steps
    if lives and is_late and not done:
        text = f"{at}; no step has ended for {since:,.0f} s, and one takes {usual:.3g} s"
        return RunStatus("waiting", text, "", version)
    if lives and not done:
        return RunStatus("training", at, "", version)
    if done:
        return RunStatus("ended", f"ended after {at}", "", version)
    failure = first_failure(folder / ATTEMPTS / UNCLAIMED if attempt is None else attempt.folder)
    if failure is not None:
        text = describe_failure(failure)
        return RunStatus("failed", f"{at}; {text.splitlines()[0]}", text, version)
    return RunStatus("stopped", f"stopped after {at}; the same command goes on", "", version)


def first_failure(attempt_folder: Path) -> FailureRecord | None:
    """Returns the failure that is not the consequence of another: an error, else a hang, else the first."""
    try:
        records = read_failures(attempt_folder).values()
    except (OSError, ValueError, TypeError):  # of another version, or removed meanwhile
        return None
    order = ("error", "plan_error", "hang", "lost_peer")
    return min(records, key=lambda each: (order.index(each.kind), each.time), default=None)


def files_version(folders: Iterable[Path]) -> str:
    """Returns a text that differs when a file that pages show of the runs `folders` has changed."""
    found = [
        (str(path), *state)
        for folder in folders
        for pattern in (*SHOWN_FILES, *SHOWN_ATTEMPTS)
        for path in sorted(folder.glob(pattern))
        for state in _state(path)
    ]
    return sha256(repr(found).encode()).hexdigest()[:16]


def _state(path: Path) -> Iterator[tuple[int, int]]:
    with suppress(OSError):  # removed meanwhile
        stat = path.stat()
        # an owner renews the modification time of its claim: that it is there is what counts
        yield (0, 0) if path.name == "owner.json" else (stat.st_mtime_ns, stat.st_size)


def _since_last_step_s(folder: Path) -> float | None:
    """Returns the seconds since the last line of metrics; None if there is none."""
    with suppress(OSError):
        return max(0.0, time.time() - (folder / METRICS_FILE).stat().st_mtime)
    return None


def _usual_step_s(record: RunRecord) -> float | None:
    seconds = [line["seconds"] for line in record.steps[-USUAL_STEPS:] if "seconds" in line]
    return median(seconds) if seconds else None
