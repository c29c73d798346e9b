"""Trackers that fail in every way: none stops a run, delays it, or fails silently."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import pytest

from meshwright.run.telemetry.callbacks import CallbackEvent, StepRecord, call_callbacks
from meshwright.run.telemetry.trackers import TrackerQueue, TrackerRun, open_trackers

TOLD = TrackerRun(Path("runs/one"), "one", "project", {"train": {"steps": 3}})


@dataclass
class Recorder:
    """A tracker that keeps what it is told; `fails_at` is a step, or "start" or "close"."""

    fails_at: int | str = ""
    lines: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    closed: bool = False

    def start(self, told: TrackerRun) -> "Recorder":
        self.told = told
        if self.fails_at == "start":
            raise ConnectionError("no route\n to host")
        return self

    def log(self, step: int, numbers: dict[str, float]) -> None:
        if step == self.fails_at:
            raise ValueError("planted")
        self.lines.append((step, dict(numbers)))

    def close(self) -> None:
        if self.fails_at == "close":
            raise SystemExit(3)
        self.closed = True


def line(step: int) -> StepRecord:
    return StepRecord(
        step, math.nan if step == 2 else 1.0 / step, 0.5, 1e-3, 10, 0.5, 20.0, 2**20, flops_per_s=1e9
    )


def play(names: list[str], known: dict, steps: int = 3) -> None:
    with open_trackers(names, TOLD, known) as callbacks:
        for step in range(1, steps + 1):
            moment = CallbackEvent(step, line(step))
            assert call_callbacks((callback.on_step_end for callback in callbacks), moment) is None
        call_callbacks(
            (callback.on_evaluate for callback in callbacks),
            CallbackEvent(steps, line(steps), {"loss": 2.0, "best": True}),
        )


def test_a_tracker_is_told_every_step_and_evaluation_in_order_and_closed(caplog):
    one, other = Recorder(), Recorder()
    play(["one", "other"], {"one": one.start, "other": other.start})
    for recorder in (one, other):
        assert recorder.told is TOLD
        assert [step for step, _ in recorder.lines] == [1, 2, 3, 3]
        first = recorder.lines[0][1]
        assert first == {
            **{
                "train/loss": 1.0,
                "train/grad_norm": 0.5,
                "train/lr": 1e-3,
                "train/tokens": 10.0,
                "train/seconds": 0.5,
            },
            **{"train/tokens_per_s": 20.0, "train/memory": 2.0**20, "train/data_s": 0.0, "train/save_s": 0.0},
            "train/flops_per_s": 1e9,
        }
        assert math.isnan(recorder.lines[1][1]["train/loss"])
        assert recorder.lines[3] == (3, {"eval/loss": 2.0})
        assert recorder.closed
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("fails_at", "message", "told"),
    [
        ("start", "the tracker bad is off: ConnectionError: no route to host. The run continues", []),
        (2, "the tracker bad is off: ValueError: planted. The run continues", [1]),
        ("close", "the tracker bad is off: SystemExit: 3. The run continues", [1, 2, 3, 3]),
    ],
)
def test_a_tracker_that_raises_is_said_once_and_the_others_go_on(caplog, fails_at, message, told):
    bad, good = Recorder(fails_at), Recorder()
    play(["bad", "good"], {"bad": bad.start, "good": good.start})
    assert [record.getMessage() for record in caplog.records] == [
        f"{message}, and its metrics are in metrics.jsonl"
    ]
    assert [step for step, _ in bad.lines] == told
    assert [step for step, _ in good.lines] == [1, 2, 3, 3]


def test_a_tracker_that_hangs_holds_nobody_up(caplog):
    released = Event()

    class Hanging(Recorder):
        def log(self, step: int, numbers: dict[str, float]) -> None:
            released.wait()

    desk = TrackerQueue("slow", Hanging().start, TOLD, close_s=0.05, max_length=4)
    for step in range(1, 101):
        desk.put_step(CallbackEvent(step, line(step)))
    desk.begin_close()
    desk.wait_closed()
    released.set()
    assert 94 <= desk.num_dropped <= 96, "one is in its hands, four wait"
    said = [record.getMessage() for record in caplog.records]
    assert "the tracker slow did not close within 0.05 s and is abandoned" in said[0]
    assert (
        f"the tracker slow was too slow: {desk.num_dropped} lines were dropped; all are in metrics.jsonl"
        in said[1]
    )


def test_a_name_that_stands_twice_is_one_tracker():
    recorder = Recorder()
    play(["one", "one"], {"one": recorder.start})
    assert len(recorder.lines) == 4


def test_a_run_that_fails_closes_its_trackers():
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="planted"), open_trackers(["one"], TOLD, {"one": recorder.start}):
        raise RuntimeError("planted")
    assert recorder.closed
