"""Prefetched batches: the same batches in the same order, errors in their step, and no thread left."""

import threading
import time
import traceback
from dataclasses import dataclass, field

import pytest
import torch

from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.data import data_loader
from meshwright.run.data.data_loader import (
    ExampleDataset,
    LocalBatches,
    PrefetchedBatches,
    open_local_batches,
)
from meshwright.run.data.data_loader import prefetch as ahead
from tests.paper_model import SyntheticModel

ROWS = {"labels": torch.arange(31)}


def local_batches(data=None, epochs: int = 0) -> LocalBatches:
    job = Job(ModelConfig("m.py:f"), DataConfig("example", epochs=epochs), TrainConfig(batch=4, seed=5))
    return open_local_batches(
        data or ExampleDataset(ROWS), Plan.make(job, Mesh(), SyntheticModel().model_spec), 0
    )


def rows(batch) -> list[int] | None:
    return None if batch is None else batch["labels"].tolist()


def threads(timeout_s: float = 5.0) -> list[str]:
    """The data threads that are still there after a moment to end in."""
    found = [thread for thread in threading.enumerate() if thread.name.startswith("data")]
    for thread in found:
        thread.join(timeout_s)
    return [thread.name for thread in found if thread.is_alive()]


@dataclass
class Watched(ExampleDataset):
    """Notes who asks for what; fails on the sample `broken`; waits for `gate` when there is one."""

    broken: int = -2
    gate: threading.Event | None = None
    asked: list[str] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        ExampleDataset.__init__(self, ROWS)

    def batch(self, ids):
        self.asked.append(threading.current_thread().name)
        self.begun.set()
        if self.gate is not None and not self.gate.wait(20):
            raise TimeoutError("nobody opened the gate")
        if self.broken in ids:
            raise ValueError(f"sample {self.broken} is broken")
        return super().batch(ids)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_are_the_same_with_any_number_of_workers(count: int):
    plain = [rows(local_batches(epochs=1).batch(step)) for step in range(9)]
    with ahead(local_batches(epochs=1), count) as made:
        assert isinstance(made, PrefetchedBatches)
        assert [rows(made.batch(step)) for step in range(9)] == plain
        assert [made.has_ended(step) for step in (7, 8)] == [False, True]
        assert made.num_steps == 8
        assert made.dataset.digest == ExampleDataset(ROWS).digest
    assert threads() == []


def test_without_workers_the_batches_are_used_as_they_are():
    here = local_batches()
    with ahead(here, 0) as made:
        assert made is here


def test_batches_are_made_by_other_threads_and_not_too_far_ahead():
    data = Watched()
    with ahead(local_batches(data), 2) as made:
        made.batch(0)
        made.batch(1)
    assert set(data.asked) <= {"data_0", "data_1"}
    assert 2 <= len(data.asked) <= 2 + 4, "at most 2 x workers ahead of the step that is played"


def test_a_step_can_be_asked_for_out_of_turn():
    plain = local_batches()
    with ahead(local_batches(), 2) as made:
        for step in (3, 3, 4, 100, 2, 5):
            assert rows(made.batch(step)) == rows(plain.batch(step))
            assert made.has_ended(step) is False


def test_an_error_is_raised_by_its_own_step_with_the_place_where_it_happened():
    order = [local_batches().order.ids(step, 4) for step in range(4)]
    with ahead(local_batches(Watched(broken=order[2][1])), 1) as made:
        for step in range(2):
            assert rows(made.batch(step)) == order[step]
        with pytest.raises(ValueError, match="is broken") as caught:
            made.batch(2)
        assert "in batch" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert threads() == []


def test_an_error_is_raised_although_a_thread_waits_and_pending_batches_are_dropped(monkeypatch):
    monkeypatch.setattr(data_loader, "FAILURE_WAIT_S", 0.0)
    gate = threading.Event()
    data = Watched(gate=gate)

    def fail() -> None:
        with ahead(local_batches(data), 1) as made:
            asking = threading.Thread(target=made.batch, args=(0,), name="data asking")
            asking.start()
            assert data.begun.wait(20)
            while len(made._queue) <= made.depth:  # or the asking thread would ask a pool that is shut
                time.sleep(0.01)
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail()
    assert threads(0.0) != [], "nobody waited for the thread that waits"
    gate.set()
    assert threads() == []
    assert len(data.asked) == 1
