"""BATCH_SUM: an auxiliary loss of a user, which reads sums over the global batch, equals one device."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.plan.job.errors import PlanError
from tests.tiny_model import Tiny, tiny_job, token_samples


def sums(outputs: Any, batch: Any) -> torch.Tensor:
    count = (batch["labels"] != -100).sum()
    return torch.stack([outputs.detach().sum(), torch.tensor(outputs.numel()), count]).double()


def spread(outputs: Any, batch: Any, sums: torch.Tensor) -> torch.Tensor:
    """The variance of all logits of the global batch, as a mean that is not divided by the count."""
    return ((outputs - sums[0] / sums[1]) ** 2).sum() / sums[1] * sums[2]


@cache
def analyzed() -> mw.AnalyzedModel:
    loss = replace(mw.token_cross_entropy(), auxiliary=mw.AuxiliaryLoss(sums, spread, 3))
    return mw.analyze(Tiny, token_samples(2), loss=loss)


def test_the_whole_total_is_cross_entropy_and_variance():
    outputs, batch = torch.randn(4, 5, 13, dtype=torch.float64), token_samples(4)
    loss = analyzed().loss
    added = outputs.var(correction=0) * loss.count(batch)
    assert torch.allclose(loss.whole_total(outputs, batch), loss.total(outputs, batch) + added)


@pytest.mark.parametrize(
    ("mesh", "micro_batch"), [(mw.Mesh(dp_replicate=3), 2), (mw.Mesh(pp=2, dp_replicate=2), 1)], ids=str
)
def test_it_equals_one_device(mesh: mw.Mesh, micro_batch: int):
    plan = mw.make_plan(analyzed(), tiny_job(12), mesh, micro_batch=micro_batch)
    whole = token_samples(12)
    verdict = mw.verify(analyzed(), plan, [whole, {key: value[:5] for key, value in whole.items()}])
    assert verdict.passed, str(verdict)


def test_sums_over_sharded_tokens_are_refused():
    with pytest.raises(PlanError, match=r"each rank along cp has its own tokens(?s:.*)mesh\.cp = 1"):
        mw.make_plan(analyzed(), tiny_job(12), mw.Mesh(cp=2))
