"""Trackers: TensorBoard, Weights & Biases, trackio, MLflow. None of them can stop a run.

`metrics.jsonl` is the record of a run; a tracker gets a copy. Rank 0 puts each line into a queue and
continues; one thread per tracker starts it, takes lines out of the queue and logs them. So

    a tracker that cannot start, or raises      logs one warning with its error and is off from then on
    a tracker that hangs (no network)           fills its queue of 10,000 lines; further lines are dropped and
                                                counted
    a tracker that is slow to close             gets `CLOSE_TIMEOUT_S` seconds after the last step, then it is
                                                abandoned

The threads are daemons: none keeps the process from ending. Every metric is logged at its global step, so
repeated steps after a resume replace the earlier ones. TensorBoard writes event files into `tensorboard/` in
the run's folder; the ids of the other trackers' runs are kept in the folder, so that a resumed run continues
them.
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

from meshwright.run.telemetry.callbacks import Callback, CallbackEvent, StepRecord

CLOSE_TIMEOUT_S = 8.0  # below the time that run/launch/local_launcher.py leaves a rank after Ctrl-C
QUEUE_LENGTH = 10_000

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackerRun:
    """The description of a run for a tracker: folder, name, project, config as nested tables, first step."""

    folder: Path
    name: str
    project: str
    config: Mapping[str, Any]
    first_step: int = 0


class Tracker(Protocol):
    """A tracker that has started. One thread makes all calls."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the metrics of a global step."""
        ...

    def close(self) -> None:
        """Flushes and closes the tracker."""
        ...


StartTracker = Callable[[TrackerRun], Tracker]


@contextmanager
def open_trackers(
    names: Sequence[str], run: TrackerRun, starters: Mapping[str, StartTracker]
) -> Iterator[tuple[Callback, ...]]:
    """Yields callbacks that log to the trackers `names`, each started by its function in `starters`; closes
    them at the end.
    """
    desks = [TrackerQueue(name, starters[name], run) for name in dict.fromkeys(names)]
    try:
        yield tuple(Callback(on_step_end=desk.put_step, on_evaluate=desk.put_evaluation) for desk in desks)
    finally:
        for desk in desks:
            desk.begin_close()
        for desk in desks:
            desk.wait_closed()


@dataclass
class TrackerQueue:
    """The queue and the thread of one tracker."""

    name: str
    start: StartTracker
    run: TrackerRun
    close_s: float = CLOSE_TIMEOUT_S
    max_length: int = QUEUE_LENGTH
    num_dropped: int = 0
    failed: Event = field(default_factory=Event)
    closing: Event = field(default_factory=Event)

    def __post_init__(self) -> None:
        self._lines: Queue[tuple[int, dict[str, float]] | None] = Queue(self.max_length)
        self._thread = Thread(target=self._serve, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def put_step(self, event: CallbackEvent) -> None:
        """Queues the record of a step."""
        if event.step_record is not None:
            self._enqueue(event.step, metrics_by_name(event.step_record))

    def put_evaluation(self, event: CallbackEvent) -> None:
        """Queues an evaluation."""
        numbers = {name: value for name, value in event.evaluation.items() if type(value) in (int, float)}
        self._enqueue(event.step, {f"eval/{name}": float(value) for name, value in numbers.items()})

    def begin_close(self) -> None:
        """Accepts no more lines: the tracker closes after it has logged the queued ones."""
        self.closing.set()
        try:
            self._lines.put_nowait(None)  # wakes a thread that waits for a line
        except Full:
            logger.debug("%s has a full queue and closes when the queue is empty", self.name)

    def wait_closed(self) -> None:
        """Waits for the tracker to close, at most `close_s` seconds; warns about lines
        that it did not get.
        """
        self._thread.join(self.close_s)
        if self._thread.is_alive():
            text = "the tracker %s did not close within %g s and is abandoned; all lines are in metrics.jsonl"
            logger.warning(text, self.name, self.close_s)
        if self.num_dropped:
            text = "the tracker %s was too slow: %d lines were dropped; all are in metrics.jsonl"
            logger.warning(text, self.name, self.num_dropped)

    def _enqueue(self, step: int, values: dict[str, float]) -> None:
        if self.failed.is_set():
            return
        try:
            self._lines.put_nowait((step, values))
        except Full:
            self.num_dropped += 1

    def _serve(self) -> None:
        try:
            tracker = self.start(self.run)
            while (line := self._next()) is not None:
                tracker.log(*line)
            tracker.close()
        except (
            BaseException
        ) as error:  # SystemExit too: some trackers leave that way; a failure of theirs is never the run's
            self.failed.set()
            text = "the tracker %s is off: %s: %s. The run continues, and its metrics are in metrics.jsonl"
            logger.warning(text, self.name, type(error).__name__, " ".join(str(error).split())[:300])

    def _next(self) -> tuple[int, dict[str, float]] | None:
        if not self.closing.is_set():
            line = self._lines.get()
            if line is not None:
                return line
        try:
            return self._lines.get_nowait()
        except Empty:
            return None


def metrics_by_name(line: StepRecord) -> dict[str, float]:
    """Returns the known metrics of a step by name."""
    metrics = {
        key: value
        for key, value in asdict(line).items()
        if key not in ("step", "skipped", "overflow") and value is not None
    }
    return {f"train/{key}": float(value) for key, value in metrics.items()}


class TensorBoardTracker(Tracker):
    """Event files in the run's folder. Steps of an earlier start that will be repeated are hidden."""

    def __init__(self, run: TrackerRun) -> None:
        _package("tensorboard", "tensorboard")
        module = import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.first_step + 1 if run.first_step else None
        )
        flat = dict(flatten_config(run.config))
        lines = [
            f"    {key} = {value}" for key, value in flat.items()
        ]  # four spaces: code, in the text tab's Markdown
        self._writer.add_text("config", "\n".join(lines), run.first_step)
        summary = import_module("torch.utils.tensorboard.summary")
        # not add_hparams, which makes a run of its own beside this one
        for part in summary.hparams(flat, {"train/loss": 0.0}):
            self._writer.file_writer.add_summary(part)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases."""

    def __init__(self, run: TrackerRun) -> None:
        wandb = _package("wandb", "wandb")
        kept = run.folder / "trackers" / "wandb"
        name = kept.read_text() if kept.exists() else secrets.token_hex(4)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True),
        )
        _keep(kept, name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker(Tracker):
    """A run of trackio."""

    def __init__(self, run: TrackerRun) -> None:
        trackio = _package("trackio", "trackio")
        self._run = trackio.init(
            project=run.project, name=run.name, config=dict(flatten_config(run.config)), resume="allow"
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflowTracker(Tracker):
    """A run of MLflow, through its client: the functions of the module keep a state per thread."""

    def __init__(self, run: TrackerRun) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self._client = self._mlflow.MlflowClient()
        kept = run.folder / "trackers" / "mlflow"
        if kept.exists():
            self._run = kept.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
        _keep(kept, self._run)
        params = [
            self._mlflow.entities.Param(key, str(value)[:500]) for key, value in flatten_config(run.config)
        ]
        for first in range(0, len(params), 100):  # the most that a server takes at once
            self._client.log_batch(self._run, params=params[first : first + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(name, value, now, step)
            for name, value in values.items()
            if isfinite(value)
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


TRACKERS: Mapping[str, StartTracker] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
    "mlflow": MLflowTracker,
}


def flatten_config(
    config: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, int | float | bool | str]]:
    """Yields the values of nested tables by dotted key; lists as text."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        text = (
            f"the package {name} cannot be imported ({error}); install it: pip install 'meshwright[{extra}]'"
        )
        raise RuntimeError(text) from error


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
