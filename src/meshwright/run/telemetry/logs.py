"""Log records of all ranks: in `logs/rank-N.log`, warnings also on the terminal.

Every rank, rank 0 too, appends its records to a file of its own. The record contains the rank:

    2026-11-20 18:00:01,123 rank 1 WARNING meshwright.run.telemetry.trackers: ...

A warning of rank 0 is shown on the terminal at once; so is a warning of another rank that has a terminal
(under torchrun). The output of the other ranks goes into their logs. When all ranks have ended, the
launching process shows their warnings that rank 0 did not have, one line per text (`unshown_warnings`).
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s rank %(rank)d %(levelname)s %(name)s: %(message)s"
RECORD_PATTERN = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ rank (\d+) (WARNING|ERROR|CRITICAL) [\w.]+: (.*)$")
MAX_SHOWN_WARNINGS = 5  # warnings shown at the end; the others are counted

logger = logging.getLogger(__name__)


def log_path(folder: Path, rank: int) -> Path:
    """Returns the log file of `rank` inside the run's `folder`."""
    return folder / "logs" / f"rank-{rank}.log"


@contextmanager
def rank_log(folder: Path, rank: int, show: Callable[[str], None] | None = None) -> Iterator[None]:
    """Sends the log records of the body to the log of `rank`, and warnings to `show` as text.

    Python's warnings are logged too. If the log cannot be opened, that is a warning; the run continues.
    """
    root, package = logging.getLogger(), logging.getLogger("meshwright")
    before = package.level
    package.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [] if show is None else [_WarningHandler(rank, show)]
    error_text = ""
    try:
        log_path(folder, rank).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_path(folder, rank), encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter(FORMAT))
    except OSError as error:
        error_text = str(error)
    for handler in handlers:
        handler.addFilter(lambda record: _with_rank(record, rank))
        root.addHandler(handler)
    logging.captureWarnings(True)
    if error_text:
        logger.warning("this rank keeps no log: %s", error_text)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        package.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def log_sizes(folder: Path) -> dict[Path, int]:
    """Returns the size in bytes of every log of the run."""
    return {path: path.stat().st_size for path in folder.glob("logs/rank-*.log")}


def unshown_warnings(folder: Path, sizes_before: Mapping[Path, int]) -> list[str]:
    """Returns the warnings of ranks other than 0 since `sizes_before` that rank 0 did not have, one line per
    text.
    """
    first: dict[str, Path] = {}
    ranks: dict[str, set[int]] = {}
    for path in sorted(folder.glob("logs/rank-*.log")):
        with path.open("rb") as file:
            file.seek(sizes_before.get(path, 0))
            lines = file.read().decode(errors="replace").splitlines()
        for match in filter(None, map(RECORD_PATTERN.match, lines)):
            first.setdefault(match[3], path)
            ranks.setdefault(match[3], set()).add(int(match[1]))
    unshown = [text for text, who in ranks.items() if 0 not in who]
    shown = [
        f"rank {', '.join(map(str, sorted(ranks[text])))} warned: {text}  ({first[text]})"
        for text in unshown[:MAX_SHOWN_WARNINGS]
    ]
    more = (
        [f"and {len(unshown) - MAX_SHOWN_WARNINGS} more warnings, in {folder / 'logs'}"]
        if len(unshown) > MAX_SHOWN_WARNINGS
        else []
    )
    return shown + more


class _WarningHandler(logging.Handler):
    def __init__(self, rank: int, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._show = show
        self.setFormatter(
            logging.Formatter("warning: %(message)s" if rank == 0 else "warning (rank %(rank)d): %(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        self._show(self.format(record))


def _with_rank(record: logging.LogRecord, rank: int) -> bool:
    vars(record)["rank"] = rank
    return True
