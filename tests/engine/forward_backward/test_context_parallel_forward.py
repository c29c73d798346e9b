"""Logits that glue computes from all tokens are equal on all ranks: their loss counts once."""

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, parallelize
from meshwright.parallel.context.ring import RingAttention
from meshwright.parallel.context.ulysses import Ulysses
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.parallel.context.test_ring_models import JOB, NUM_SAMPLES, REPLICAS, Own
from tests.parallel.tensor.odd_llama import batches


class Last(Own):
    """Of a row, the logits behind its last token."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)[:, -1]


class Mean(Own):
    """Of a row, the mean of all logits."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids).mean(1)


class Tied(Own):
    """A head that is a product of glue."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return (
            x @ self.words.weight.T
            + 0 * self.head.bias
            + 0 * self.places.weight.sum()
            + 0 * self.head.weight.sum()
        )


@pytest.mark.parametrize("strategy", [RingAttention(), Ulysses()], ids=lambda each: each.name)
@pytest.mark.parametrize("make", [Last, Mean, Tied])
def test_losses_equal_one_device(make: type[nn.Module], strategy: Strategy):
    samples = batches(3, NUM_SAMPLES)
    if make is not Tied:
        samples = [{"input_ids": each["input_ids"], "labels": each["labels"][:, 0]} for each in samples]
    torch.manual_seed(0)
    analyzed = analyze(make(), samples[0])

    def losses(mesh: Mesh, *strategies: Strategy) -> list[float]:
        plan = make_plan(analyzed, JOB, mesh, strategies, 2)

        def train(world):
            with parallelize(analyzed, plan, world=world) as engine:
                return [engine.step(engine.local_batch(each)).loss for each in samples]

        return run_on_threads(train, mesh)[0]

    assert losses(Mesh(cp=2), strategy, REPLICAS) == pytest.approx(losses(Mesh()), rel=1e-5)
