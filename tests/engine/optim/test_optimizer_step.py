"""Clipping without reading the norm: on a GPU the host does not wait for it, and weights are the same."""

from dataclasses import replace

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.engine.optim.optimizer_step import OptimizerUpdate
from meshwright.plan.job.job import OptimizerConfig, PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import analyzed_model, tiny_job, token_samples

PRECISIONS = {
    "in place": PrecisionConfig(),
    "cast": PrecisionConfig("bfloat16", "bfloat16", "bfloat16", master="float32"),
}


def train(
    precision: PrecisionConfig, optimizer: str, clip: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    job = tiny_job(precision=precision, optimizer=OptimizerConfig(optimizer, lr=0.1))
    job = replace(job, train=replace(job.train, clip=clip))
    plan = make_plan(analyzed_model(), job, Mesh(), (), 2)
    samples = {key: value[:12] for key, value in token_samples().items()}
    with parallelize(analyzed_model(), plan) as trainer:
        norms = [trainer.step(samples).grad_norm for _ in range(3)]
        return trainer.executor.gather_parameters(), norms


@pytest.mark.parametrize("clip", [0.0, 0.05, 1e6])
@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_are_those_of_a_step_that_reads_the_norm(
    precision: str, optimizer: str, clip: float, monkeypatch: pytest.MonkeyPatch
):
    reads = train(PRECISIONS[precision], optimizer, clip)
    monkeypatch.setattr(OptimizerUpdate, "_clip_read", OptimizerUpdate._clip_unread)
    unread = train(PRECISIONS[precision], optimizer, clip)
    assert unread[1] == pytest.approx(reads[1])
    for name, values in reads[0].items():
        torch.testing.assert_close(unread[0][name], values, rtol=1e-5, atol=1e-7)


def test_a_step_group_by_group_visits_each_parameter_once(monkeypatch: pytest.MonkeyPatch):
    visited: list[int] = []
    step = torch.optim.AdamW.step

    def counting(self: torch.optim.AdamW, closure: None = None) -> None:
        visited.append(sum(len(group["params"]) for group in self.param_groups))
        step(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", counting)
    train(PRECISIONS["cast"], "adamw", 0.0)
    num_params = len(analyzed_model().model_spec.trainable)
    assert len(visited) > 3  # several groups in each of three steps
    assert sum(visited) == 3 * num_params
