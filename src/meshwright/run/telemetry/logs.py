"""What ranks have to say beside the figures: records in `logs/rank-N.log`, warnings where the user sees them.

Every rank, rank 0 too, appends its records to a file of its own. The rank stands in the record, not in the text:

    2026-11-20 18:00:01,123 rank 1 WARNING meshwright.run.telemetry.trackers: ...

A warning of rank 0 is also shown on the terminal, at once; so is one of another rank that has a terminal (under torchrun).
A rank whose output goes into its log has none: what it warned of, and rank 0 did not, is told by the launching process
when all have ended, in one line per text (`unheard`).
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

FORMAT = "%(asctime)s rank %(rank)d %(levelname)s %(name)s: %(message)s"
RECORD_PATTERN = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ rank (\d+) (WARNING|ERROR|CRITICAL) [\w.]+: (.*)$")
MAX_SHOWN_WARNINGS = 5  # warnings told at the end; the others are counted

logger = logging.getLogger(__name__)


def log_path(folder: Path, rank: int) -> Path:
    """Where `rank` keeps its log, inside the run's `folder`."""
    return folder / "logs" / f"rank-{rank}.log"


@contextmanager
def rank_log(folder: Path, rank: int, show: Callable[[str], None] | None = None) -> Iterator[None]:
    """While inside, records of this process go to the log of `rank`, and warnings, as texts, to `show` too.

    Python's own warnings are recorded as well. A log that cannot be opened is a warning itself; the run goes on.
    """
    root, package = logging.getLogger(), logging.getLogger("meshwright")
    before = package.level
    package.setLevel(logging.INFO)
    handlers: list[logging.Handler] = [] if show is None else [_Shown(rank, show)]
    trouble = ""
    try:
        log_path(folder, rank).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_path(folder, rank), encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter(FORMAT))
    except OSError as error:
        trouble = str(error)
    for handler in handlers:
        handler.addFilter(lambda record: _with_rank(record, rank))
        root.addHandler(handler)
    logging.captureWarnings(True)
    if trouble:
        logger.warning("this rank keeps no log: %s", trouble)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        package.setLevel(before)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


def log_sizes(folder: Path) -> dict[Path, int]:
    """How long every log of the run is by now, in bytes."""
    return {path: path.stat().st_size for path in folder.glob("logs/rank-*.log")}


def unshown_warnings(folder: Path, sizes_before: Mapping[Path, int]) -> list[str]:
    """What ranks other than 0 have warned of since `before` and rank 0 has not, in words, a line for each text."""
    first: dict[str, Path] = {}
    ranks: dict[str, set[int]] = {}
    for path in sorted(folder.glob("logs/rank-*.log")):
        with path.open("rb") as file:
            file.seek(sizes_before.get(path, 0))
            lines = file.read().decode(errors="replace").splitlines()
        for match in filter(None, map(RECORD_PATTERN.match, lines)):
            first.setdefault(match[3], path)
            ranks.setdefault(match[3], set()).add(int(match[1]))
    alone = [text for text, who in ranks.items() if 0 not in who]
    said = [
        f"rank {', '.join(map(str, sorted(ranks[text])))} warned: {text}  ({first[text]})"
        for text in alone[:MAX_SHOWN_WARNINGS]
    ]
    more = (
        [f"and {len(alone) - MAX_SHOWN_WARNINGS} more warnings, in {folder / 'logs'}"]
        if len(alone) > MAX_SHOWN_WARNINGS
        else []
    )
    return said + more


class _Shown(logging.Handler):
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
