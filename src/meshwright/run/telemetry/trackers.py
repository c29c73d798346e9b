"""Others who are told the metrics of a run: TensorBoard, Weights & Biases, trackio, MLflow. None of them can stop it.

`metrics.jsonl` is the truth; a tracker is a copy for those who like to look elsewhere. Rank 0 hands each line to a queue
and goes on; a thread per tracker starts it, takes lines out and tells them (run/adapters.py). So

    a tracker that cannot start, or raises      is said once, with its error, and is off from then on
    one that hangs (a network that is gone)     fills its queue of 10,000 lines; what does not fit is dropped and counted
    one that is slow to end                     gets `CLOSE_S` seconds after the last step, then it is left behind

The threads are daemons: none keeps the process from ending. Every metric stands at its global step, so steps that are
played again after a resume stand where they stood before.

The trackers that are known by name, each as a function that starts it (run/trackers.py).

    tensorboard   event files in the run's folder, `tensorboard/`; the config as hyperparameters and as a text
    wandb         a run of the project; started again, the same run goes on (its id stays in `trackers/wandb`)
    trackio       a run of the project, goes on likewise
    mlflow        a run of the experiment that has the project's name, goes on likewise (`trackers/mlflow`)

They read their own environment (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI...) as they do everywhere. Their packages are
extras: `pip install 'meshwright[wandb]'`.
"""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from math import isfinite
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from time import time
from typing import Any, Protocol

from meshwright.run.telemetry.callbacks import Callback, Line, Moment

CLOSE_S = 8.0  # below the time that run/launch.py leaves a rank after Ctrl-C
QUEUE = 10_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What a tracker learns of a run: its folder and name, the project, its config as nested tables, the step it starts at."""

    folder: Path
    name: str
    project: str
    config: Mapping[str, Any]
    first: int = 0


class Tracker(Protocol):
    """One tracker that has started. All calls come from one thread."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the metrics of a global step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


Start = Callable[[Told], Tracker]


@contextmanager
def tracked(names: Sequence[str], told: Told, known: Mapping[str, Start]) -> Iterator[tuple[Callback, ...]]:
    """Callbacks that tell the trackers `names`, each started by its function in `known`; on leaving, they are closed."""
    desks = [Desk(name, known[name], told) for name in dict.fromkeys(names)]
    try:
        yield tuple(Callback(on_step_end=desk.step, on_evaluate=desk.evaluation) for desk in desks)
    finally:
        for desk in desks:
            desk.shut()
        for desk in desks:
            desk.leave()


@dataclass
class Desk:
    """Where one tracker's lines wait for it."""

    name: str
    start: Start
    told: Told
    close_s: float = CLOSE_S
    length: int = QUEUE
    dropped: int = 0
    off: Event = field(default_factory=Event)
    ending: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self._lines: Queue[tuple[int, dict[str, float]] | None] = Queue(self.length)
        self._thread = Thread(target=self._serve, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def step(self, moment: Moment) -> None:
        """Queue the line of a step."""
        if moment.line is not None:
            self._put(moment.step, numbers_of(moment.line))

    def evaluation(self, moment: Moment) -> None:
        """Queue an evaluation."""
        numbers = {name: value for name, value in moment.evaluation.items() if type(value) in (int, float)}
        self._put(moment.step, {f"eval/{name}": float(value) for name, value in numbers.items()})

    def shut(self) -> None:
        """Take no more lines: the tracker closes once it has told those that wait."""
        self.ending.set()
        try:
            self._lines.put_nowait(None)  # wakes a thread that waits for a line
        except Full:
            logger.debug("%s has a full queue and sees by itself that the end has come", self.name)

    def leave(self) -> None:
        """Wait for the tracker to close, `close_s` at most; say what it did not get."""
        self._thread.join(self.close_s)
        if self._thread.is_alive():
            text = "the tracker %s did not end within %g s and is left behind; all lines are in metrics.jsonl"
            logger.warning(text, self.name, self.close_s)
        if self.dropped:
            text = "the tracker %s was too slow: %d lines were not told; all are in metrics.jsonl"
            logger.warning(text, self.name, self.dropped)

    def _put(self, step: int, numbers: dict[str, float]) -> None:
        if self.off.is_set():
            return
        try:
            self._lines.put_nowait((step, numbers))
        except Full:
            self.dropped += 1

    def _serve(self) -> None:
        try:
            tracker = self.start(self.told)
            while (line := self._next()) is not None:
                tracker.log(*line)
            tracker.close()
        except BaseException as error:  # SystemExit too: some trackers leave that way; a failure of theirs is never the run's
            self.off.set()
            text = "the tracker %s is off: %s: %s. The run goes on, and its metrics are in metrics.jsonl"
            logger.warning(text, self.name, type(error).__name__, " ".join(str(error).split())[:300])

    def _next(self) -> tuple[int, dict[str, float]] | None:
        """The next line; None when there is none and none will come."""
        if not self.ending.is_set():
            line = self._lines.get()
            if line is not None:
                return line
        try:
            return self._lines.get_nowait()
        except Empty:
            return None


def numbers_of(line: Line) -> dict[str, float]:
    """The metrics of a step by name; those that are not known are left out."""
    said = {key: value for key, value in asdict(line).items() if key not in ("step", "skipped", "overflow") and value is not None}
    return {f"train/{key}": float(value) for key, value in said.items()}


class TensorBoard(Tracker):
    """Event files in the run's folder. Steps of an earlier start that will be played again are hidden."""

    def __init__(self, told: Told) -> None:
        _package("tensorboard", "tensorboard")
        module = import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(told.folder / "tensorboard"), purge_step=told.first + 1 if told.first else None)
        flat = dict(flattened(told.config))
        lines = [f"    {key} = {value}" for key, value in flat.items()]  # four spaces: code, in the text tab's Markdown
        self._writer.add_text("config", "\n".join(lines), told.first)
        summary = import_module("torch.utils.tensorboard.summary")
        # not add_hparams, which makes a run of its own beside this one
        for part in summary.hparams(flat, {"train/loss": 0.0}):
            self._writer.file_writer.add_summary(part)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, told: Told) -> None:
        wandb = _package("wandb", "wandb")
        kept = told.folder / "trackers" / "wandb"
        name = kept.read_text() if kept.exists() else secrets.token_hex(4)
        self._run = wandb.init(
            project=told.project,
            name=told.name,
            id=name,
            resume="allow",
            dir=str(told.folder),
            config=dict(told.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        _keep(kept, name)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """A run of trackio."""

    def __init__(self, told: Told) -> None:
        trackio = _package("trackio", "trackio")
        self._run = trackio.init(project=told.project, name=told.name, config=dict(flattened(told.config)), resume="allow")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow, through its client: the module's own functions keep a state per thread."""

    def __init__(self, told: Told) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        kept = told.folder / "trackers" / "mlflow"
        if kept.exists():
            self._run = kept.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(told.project)
        experiment = self._client.create_experiment(told.project) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=told.name).info.run_id
        _keep(kept, self._run)
        params = [self._mlflow.entities.Param(key, str(value)[:500]) for key, value in flattened(told.config)]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time() * 1000)
        metrics = [self._mlflow.entities.Metric(name, value, now, step) for name, value in numbers.items() if isfinite(value)]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


ADAPTERS: Mapping[str, Start] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def flattened(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int | float | bool | str]]:
    """The values of nested tables by dotted key; lists as text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        text = f"the package {name} cannot be imported ({error}); install it: pip install 'meshwright[{extra}]'"
        raise RuntimeError(text) from error


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
