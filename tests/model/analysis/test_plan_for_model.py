"""Job settings about a model that the program made itself: filled in, or refused where they would be
ignored.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw

EXAMPLE = {"x": torch.ones(4, 3), "y": torch.ones(4, 2)}
TRAIN = mw.TrainConfig(steps=2, batch=4)


def squares() -> mw.Loss:
    return mw.Loss(
        lambda out, batch: ((out - batch["y"]) ** 2).sum(),
        lambda batch: torch.tensor(len(batch["y"])),
        ("y",),
    )


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def analyzed(factory: object = Net, weights: str = "") -> mw.AnalyzedModel:
    return mw.analyze(factory, EXAMPLE, loss=squares(), weights=weights)


def test_a_program_that_has_model_and_data_need_not_name_them():
    plan = mw.make_plan(analyzed(), mw.Job(train=TRAIN), mw.Mesh(dp_replicate=2))
    assert (plan.job.model.source, plan.job.data.source) == ("model", "example")
    assert mw.verify(analyzed(), plan, [EXAMPLE], loss=squares()).passed


def test_names_that_are_given_are_kept():
    job = mw.Job(mw.ModelConfig("mine"), mw.DataConfig("rows"), TRAIN)
    assert mw.make_plan(analyzed(), job).job == job


def test_freezing_by_the_job_what_the_model_trains_is_refused():
    job = mw.Job(mw.ModelConfig(frozen=("first.*",)), train=TRAIN)
    with pytest.raises(
        mw.PlanError, match=r"model.frozen: 'first.\*' is to be frozen, and .* trains first.bias"
    ) as caught:
        mw.make_plan(analyzed(), job)
    assert "requires_grad_(False)" in str(caught.value)

    def frozen() -> Net:
        net = Net()
        net.first.requires_grad_(False)
        return net

    assert mw.make_plan(analyzed(frozen), job).job.model.frozen == ("first.*",)


def test_weights_of_the_job_that_the_model_was_not_read_with_are_refused(tmp_path: Path):
    job = mw.Job(train=TRAIN)
    with mw.parallelize(analyzed(), mw.make_plan(analyzed(), job), loss=squares()) as engine:
        engine.export(tmp_path / "out")
    stored = str(tmp_path / "out")
    loading = mw.Job(mw.ModelConfig(weights=stored), train=TRAIN)
    with pytest.raises(mw.PlanError, match=r"model.weights: weights = .*\n  repair: pass them to analyze"):
        mw.make_plan(analyzed(), loading)
    assert mw.make_plan(analyzed(weights=stored), loading).job.model.weights == stored
