"""Outputs that a model computes over all samples are told from sums over them and from learned scalars."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.api import analyze, make_plan, verify
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.model.loss.loss_definition import Loss
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.plan.job.errors import PlanError
from meshwright.plan.model_spec.model_spec import BatchStatistic
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import TOKENS, VOCABULARY, WIDTH, tiny_job, token_samples

USUAL, NUM_EXPERTS = token_cross_entropy(), 3  # as many as a trial has samples
Combine = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]


class Gated(nn.Module):
    """A block that returns the shares of its experts per token, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_EXPERTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.gate(x).softmax(-1)
        return x + self.linear(x).tanh() * shares[..., :1], shares


class Model(nn.Module):
    """Returns logits, and a scalar that `combine` makes of the shares of all blocks and a parameter."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Gated() for _ in range(2))
        self.scale, self.combine = nn.Parameter(torch.ones(())), combine

    def forward(self, input_ids: torch.Tensor) -> dict[str, Any]:
        x, found = self.embed(input_ids), []
        for layer in self.layers:
            x, shares = layer(x)
            found.append(shares)
        return {"logits": self.head(x), "more": {"balance": self.combine(found, self.scale)}}


def analyzed(combine: Combine, total: Callable[[Any, Any], torch.Tensor]) -> AnalyzedModel:
    return analyze(lambda: Model(combine), token_samples(6), loss=Loss(total, USUAL.count))


def added(outputs: Any, batch: Any) -> torch.Tensor:
    return USUAL.total(outputs, batch) + outputs["more"]["balance"]


def weighted(outputs: Any, batch: Any) -> torch.Tensor:
    return USUAL.total(outputs, batch) + outputs["more"]["balance"] * USUAL.count(batch)


STATISTICS: dict[str, Combine] = {
    "mean": lambda found, scale: sum(shares.mean() for shares in found),
    "squares of means": lambda found, scale: sum(shares.mean((0, 1)).square().sum() for shares in found),
    "product of sums": lambda found, scale: found[0].sum() * found[1].sum(),
    "largest": lambda found, scale: torch.stack([shares.amax() for shares in found]).sum(),
}
SUMS: dict[str, Combine] = {
    "sum": lambda found, scale: sum(shares.square().sum() for shares in found),
    "sum of a stack": lambda found, scale: 0.1 * torch.stack([shares.pow(3).sum() for shares in found]).sum(),
    "sum of sums": lambda found, scale: -found[0].log().sum((0, 1)).sum() * 2,
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_a_statistic_of_all_samples_is_named_and_refused_in_parts(kind: str):
    model = analyzed(STATISTICS[kind], weighted)
    logits, balance = model.model_spec.outputs
    assert (logits.statistic, balance.statistic) == (None, BatchStatistic("outputs.more.balance"))
    make_plan(model, tiny_job(6), Mesh(pp=2))
    for mesh, micro_batch in ((Mesh(dp_shard=3), 0), (Mesh(pp=2), 2)):
        with pytest.raises(
            PlanError,
            match=r"takes outputs\.more\.balance, which the model computes over(?s:.*)per sample, and",
        ):
            make_plan(model, tiny_job(6), mesh, micro_batch=micro_batch)


@pytest.mark.parametrize("kind", SUMS)
def test_a_sum_over_samples_is_none_and_equals_one_device_in_parts(kind: str):
    model = analyzed(SUMS[kind], added)
    assert [output.statistic for output in model.model_spec.outputs] == [None, None]
    plan = make_plan(model, tiny_job(6), Mesh(dp_replicate=3), micro_batch=1)
    assert verify(model, plan, [token_samples(6)] * 2).passed


def test_a_learned_scalar_is_none():
    model = analyzed(lambda found, scale: scale.exp(), weighted)
    assert [output.statistic for output in model.model_spec.outputs] == [None, None]
    plan = make_plan(model, tiny_job(6), Mesh(dp_replicate=2))
    assert verify(model, plan, [token_samples(6)] * 2).passed


def test_a_statistic_that_no_loss_reads_refuses_nothing():
    model = analyzed(STATISTICS["mean"], USUAL.total)
    assert model.model_spec.outputs[1].statistic is not None
    assert model.example["input_ids"].shape[1] == TOKENS
    make_plan(model, tiny_job(6), Mesh(dp_replicate=3), micro_batch=1)


def test_a_loss_of_the_whole_batch_takes_no_sum_over_the_samples_of_a_rank():
    def total(outputs: Any, batch: Any) -> torch.Tensor:
        return outputs["logits"].square().sum() + outputs["more"]["balance"]

    loss = Loss(total, lambda batch: torch.tensor(len(batch["labels"])), whole_batch=True)
    model = analyze(lambda: Model(SUMS["sum"]), token_samples(6), loss=loss)
    with pytest.raises(PlanError, match=r"takes outputs\.more\.balance"):
        make_plan(model, tiny_job(6), Mesh(dp_replicate=2))
    make_plan(model, tiny_job(6), Mesh(pp=2))
