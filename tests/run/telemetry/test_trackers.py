"""Tracker adapters: TensorBoard files read back; other trackers against small fakes that record calls."""

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from meshwright.plan.job.checkpoint_logging_config import TRACKERS
from meshwright.run.telemetry.trackers import TRACKERS as ADAPTERS
from meshwright.run.telemetry.trackers import (
    MLflowTracker,
    TensorBoardTracker,
    TrackerRun,
    TrackioTracker,
    WandbTracker,
    flatten_config,
)

CONFIG = {
    "train": {"steps": 3, "clip": 1.0},
    "run": {"folder": "runs/one", "trackers": ["wandb"]},
    "mesh": {},
}
FLAT = {"train.steps": 3, "train.clip": 1.0, "run.folder": "runs/one", "run.trackers": "['wandb']"}


def told(folder: Path, first: int = 0) -> TrackerRun:
    return TrackerRun(folder, "one", "project", CONFIG, first)


class Recorded(ModuleType):
    """A package whose functions note how they are called."""

    def __init__(self, name: str, calls: list[tuple], **answers: Any) -> None:
        super().__init__(name)
        self._calls, self._answers = calls, answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: object, **named: object) -> object:
            self._calls.append((name, args, named))
            return self._answers.get(name)

        return call


@pytest.fixture
def calls() -> list[tuple]:
    return []


def test_every_name_of_the_core_has_an_adapter():
    assert tuple(ADAPTERS) == TRACKERS


def test_nested_tables_become_dotted_keys():
    assert dict(flatten_config(CONFIG)) == FLAT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf, inside tensorboard
def test_tensorboard_holds_every_metric_at_its_step_and_the_config_as_hyperparameters(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoardTracker(told(tmp_path))
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step, "train/lr": math.nan if step == 2 else 0.5})
    tracker.close()
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert math.isnan(found.Scalars("train/lr")[1].value)
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    train.steps = 3" in text
    plugins = found.summary_metadata
    start = plugins["_hparams_/session_start_info"].plugin_data.content
    assert b"train.steps" in start
    assert b"runs/one" in start


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_hides_the_steps_that_are_played_again(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    first = TensorBoardTracker(told(tmp_path))
    for step in (1, 2, 3, 4):
        first.log(step, {"train/loss": 1.0})
    first.close()
    again = TensorBoardTracker(told(tmp_path, first=2))
    again.log(3, {"train/loss": 2.0})
    again.close()
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_wandb_gets_one_run_that_goes_on_after_a_resume(tmp_path, monkeypatch, calls):
    run = Recorded("run", calls)
    monkeypatch.setitem(sys.modules, "wandb", Recorded("wandb", calls, init=run))
    for first in (0, 3):
        tracker = WandbTracker(told(tmp_path, first))
        tracker.log(first + 1, {"train/loss": 0.5})
        tracker.close()
    starts = [named for name, _, named in calls if name == "init"]
    assert [(named["project"], named["name"], named["resume"], named["config"]) for named in starts] == [
        ("project", "one", "allow", CONFIG)
    ] * 2
    assert starts[0]["id"] == starts[1]["id"]
    assert [(args, named) for name, args, named in calls if name == "log"] == [
        (({"train/loss": 0.5},), {"step": 1}),
        (({"train/loss": 0.5},), {"step": 4}),
    ]
    assert [name for name, _, _ in calls].count("finish") == 2


def test_trackio_gets_a_run_of_the_project_with_the_config(tmp_path, monkeypatch, calls):
    run = Recorded("run", calls)
    monkeypatch.setitem(sys.modules, "trackio", Recorded("trackio", calls, init=run))
    tracker = TrackioTracker(told(tmp_path))
    tracker.log(7, {"train/loss": 0.5})
    tracker.close()
    assert calls == [
        ("init", (), {"project": "project", "name": "one", "config": FLAT, "resume": "allow"}),
        ("log", ({"train/loss": 0.5},), {"step": 7}),
        ("finish", (), {}),
    ]


def fake_mlflow(calls: list[tuple], experiment: object) -> ModuleType:
    info = SimpleNamespace(info=SimpleNamespace(run_id="run-1"))
    client = Recorded(
        "client", calls, get_experiment_by_name=experiment, create_experiment="7", create_run=info
    )
    module = Recorded("mlflow", calls, MlflowClient=client)
    module.entities = SimpleNamespace(Param=lambda *words: words, Metric=lambda *words: words)
    return module


@pytest.mark.parametrize(("experiment", "used"), [(None, "7"), (SimpleNamespace(experiment_id="3"), "3")])
def test_mlflow_gets_a_run_of_the_projects_experiment(tmp_path, monkeypatch, calls, experiment, used):
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow(calls, experiment))
    tracker = MLflowTracker(told(tmp_path))
    tracker.log(2, {"train/loss": 0.5, "train/grad_norm": math.nan})
    tracker.close()
    by_name = {name: (args, named) for name, args, named in calls if name != "log_batch"}
    assert by_name["create_run"] == ((used,), {"run_name": "one"})
    assert by_name["set_terminated"] == (("run-1",), {})
    params, metrics = [named for name, _, named in calls if name == "log_batch"]
    assert dict(params["params"]) == {key: str(value) for key, value in FLAT.items()}
    assert [(name, value, step) for name, value, _, step in metrics["metrics"]] == [("train/loss", 0.5, 2)]


def test_an_mlflow_run_goes_on_after_a_resume(tmp_path, monkeypatch, calls):
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow(calls, None))
    MLflowTracker(told(tmp_path)).close()
    calls.clear()
    MLflowTracker(told(tmp_path, first=3)).close()
    assert [name for name, _, _ in calls] == ["MlflowClient", "update_run", "set_terminated"]
    assert calls[1][1:] == (("run-1",), {"status": "RUNNING"})


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_not_there_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        RuntimeError, match=rf"the package {name} cannot be imported .* pip install 'meshwright\[{name}\]'"
    ):
        ADAPTERS[name](told(tmp_path))
