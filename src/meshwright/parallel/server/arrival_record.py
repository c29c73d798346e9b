"""The order in which a server applied the updates of its workers: kept by clocks, written, and read back.

A server decides nothing but whose push comes next. From that order follows all else: how many steps each
worker has done, which version of the parameters it was given, and when (`WorkerClocks`). So a file with the
order is enough to repeat a run. It is text; a line holds the updates of one step of the server, each as
worker:step:version, and a checksum of all lines so far:

    {"format": "arrivals 1", "plan": "5f0c...", "server": 3, "workers": 3, "bound": 1, "first_step": 0}
    0:0:0 2:0:0 0:1:1 8a1b2c3d4e5f6071
    1:0:0 2:1:2 0:2:3 ...

`version` is that of the parameters of which the gradient was made: so many updates had been applied. The
staleness of an update are the updates that were applied between.
"""

import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from meshwright.plan.job.errors import PlanError

FORMAT = "arrivals 1"
REPLAY = "strategies.stale_server.replay"
FIX = "replay the files that the run wrote, unchanged"
START_FIX = "replay from where the record begins, or record the run that goes on from this checkpoint"


class Update(NamedTuple):
    """One push that was applied: of which worker, its step from 0, and the version it was made with."""

    worker: int
    step: int
    version: int


class WorkerClocks:
    """The steps that `num_workers` workers have done, and the versions they have, as their server sees it.

    A worker that has done more than `bound` steps more than the slowest one waits (None: it never does).
    """

    def __init__(self, num_workers: int, bound: int | None) -> None:
        self.num_applied = 0  # the version of the parameters
        self._bound = bound
        self._steps, self._versions = [0] * num_workers, [0] * num_workers
        self._waiting: list[int] = []

    def apply(self, worker: int) -> Update:
        """Counts the push of `worker`, which then waits for parameters. Raises ValueError if it waits
        already: it could not have pushed.
        """
        if worker in self._waiting or not 0 <= worker < len(self._steps):
            raise ValueError(
                f"worker {worker} pushed update {self.num_applied}, and it is not one of those that may: "
                f"{', '.join(str(each) for each in range(len(self._steps)) if each not in self._waiting)}"
            )
        update = Update(worker, self._steps[worker], self._versions[worker])
        self._steps[worker] += 1
        self.num_applied += 1
        self._waiting.append(worker)
        return update

    def release(self) -> list[int]:
        """Returns the workers that may go on now, as they came, and gives them the present version."""
        limit = None if self._bound is None else min(self._steps) + self._bound
        ready = [each for each in self._waiting if limit is None or self._steps[each] <= limit]
        self._waiting = [each for each in self._waiting if each not in ready]
        for worker in ready:
            self._versions[worker] = self.num_applied
        return ready


def most_staleness(bound: int, num_workers: int) -> int:
    """Returns the largest staleness that an update can have under `bound`.

    While a worker makes one step, every other one pushes at most 2 bound + 1 times: it may have done `bound`
    steps fewer at the begin, and `bound` + 1 more at the end.
    """
    return (2 * bound + 1) * (num_workers - 1)


@dataclass(frozen=True)
class RecordHeader:
    """Of which run a record is: digest of its plan, rank of the server, workers, bound, first step."""

    plan: str
    server: int
    workers: int
    bound: int | None
    first_step: int = 0


@dataclass(frozen=True)
class ArrivalRecord:
    """The updates of one server, in the order in which it applied them."""

    header: RecordHeader
    updates: tuple[Update, ...]

    @property
    def staleness(self) -> Counter[int]:
        """How many updates had which staleness."""
        return staleness_of(self.updates)

    @property
    def num_steps(self) -> int:
        """The steps of the server that it holds."""
        return len(self.updates) // self.header.workers


def start_problem(recorded: RecordHeader, num_steps: int) -> str:
    """Returns why a run that begins behind `num_steps` steps cannot follow a record from there; "": it can.

    All workers have pulled what a checkpoint has when it is saved where they go on together; elsewhere they
    have several versions of parameters.
    """
    go_on_together, first = recorded.bound == 0 or recorded.workers == 1, recorded.first_step
    if num_steps == first or (num_steps > first and go_on_together):
        return ""
    text = f"the run begins with step {num_steps + 1}, and the record with step {first + 1}"
    if num_steps < first:
        return text
    bound = "without a bound" if recorded.bound is None else f"under bound {recorded.bound}"
    text += f": {bound}, workers have several versions of parameters in between, and a checkpoint has the"
    return f"{text} last one"


def staleness_of(updates: Iterable[Update]) -> Counter[int]:
    """Returns how many of `updates`, all from the first one on, had which staleness."""
    return Counter(number - update.version for number, update in enumerate(updates))


def are_of_one_run(records: Sequence[ArrivalRecord]) -> bool:
    """Returns whether the servers of `records` can have taken their updates in one run: a worker pushes its
    next gradient when all servers have let it go on.
    """
    left = [deque(record.updates) for record in records]
    clocks = [WorkerClocks(record.header.workers, record.header.bound) for record in records]
    pulls = [Counter[int]() for _ in records]
    while any(left):
        nexts = ((index, updates[0]) for index, updates in enumerate(left) if updates)
        ready = (index for index, (worker, step, _) in nexts if all(each[worker] >= step for each in pulls))
        server = next(ready, None)
        if server is None:
            return False
        clocks[server].apply(left[server].popleft().worker)
        pulls[server].update(clocks[server].release())
    return True


class RecordWriter:
    """Writes the record of one server to `path`, line by line; an older file there is replaced."""

    def __init__(self, path: Path, header: RecordHeader) -> None:
        self._path, self._digest = path, sha256()
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(header)})
        self._digest.update(text.encode())
        path.write_text(f"{text}\n", encoding="utf-8")

    def append(self, updates: Sequence[Update]) -> None:
        """Writes the updates of one step."""
        text = _line(updates)
        self._digest.update(text.encode())
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{text} {self._digest.hexdigest()[:16]}\n")


def record_path(folder: str, server: int) -> Path:
    """Returns the file of the server at rank `server` in `folder`."""
    return Path(folder) / f"arrivals-{server}.txt"


def read_record(path: Path) -> ArrivalRecord:
    """Returns the record in `path`.

    Raises PlanError for a file that is missing, is no record, was edited, or whose order cannot have been.
    """
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines()
        table = json.loads(first)
        is_known = table.pop("format") == FORMAT
        header = RecordHeader(**table)
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # of JSON, or of its keys
        raise _error(f"{path} is no record of arrivals") from error
    if not is_known:
        raise _error(f"{path} is no record of arrivals in the format '{FORMAT}'")
    digest, updates = sha256(first.encode()), list[Update]()
    clocks = WorkerClocks(header.workers, header.bound)
    for number, line in enumerate(lines, 2):
        text, _, checksum = line.rpartition(" ")
        digest.update(text.encode())
        if checksum != digest.hexdigest()[:16]:
            raise _error(f"line {number} of {path} does not have the checksum {checksum or 'that it needs'}")
        try:
            found = [(update, clocks.apply(update.worker), clocks.release()) for update in _updates(text)]
        except (ValueError, TypeError) as error:
            raise _error(f"line {number} of {path} is no order of pushes: {error}") from error
        wrong = next((given for given, needed, _ in found if given != needed), None)
        if wrong is not None:
            raise _error(f"line {number} of {path}: {wrong} cannot have been, after those before it")
        updates += [update for update, *_ in found]
    return ArrivalRecord(header, tuple(updates))


def _line(updates: Sequence[Update]) -> str:
    return " ".join(":".join(map(str, update)) for update in updates)


def _updates(text: str) -> Iterable[Update]:
    return (Update(*map(int, each.split(":"))) for each in text.split())


def _error(text: str) -> PlanError:
    return PlanError(text, fix=FIX, location=REPLAY)
