"""The trackers that are known by name, each as a function that starts it (run/trackers.py).

    tensorboard   event files in the run's folder, `tensorboard/`; the config as hyperparameters and as a text
    wandb         a run of the project; started again, the same run goes on (its id stays in `trackers/wandb`)
    trackio       a run of the project, goes on likewise
    mlflow        a run of the experiment that has the project's name, goes on likewise (`trackers/mlflow`)

They read their own environment (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI...) as they do everywhere. Their packages are
extras: `pip install 'meshwright[wandb]'`.
"""

import secrets
from collections.abc import Iterator, Mapping
from importlib import import_module
from math import isfinite
from pathlib import Path
from time import time
from typing import Any

from meshwright.run.trackers import Start, Told, Tracker


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
