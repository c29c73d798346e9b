"""Batch norms are refused where each rank would see a part of the batch, and accepted elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import meshwright as mw
from meshwright.model.blocks.batch_coupling import batch_coupled_norms
from meshwright.parallel.data.ddp import DDP
from meshwright.plan.job.errors import PlanError
from tests.parallel.data.tokenwise_model import TokenSharding
from tests.tiny_model import tiny_job


class Normed(nn.Module):
    """Two linears with a norm between them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), norm, nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


LOSS = mw.Loss(
    lambda outputs, batch: outputs.square().sum(), lambda batch: torch.tensor(len(batch["y"])), ("y",)
)


def samples(count: int = 24) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {"x": torch.randn(count, 4, generator=generator), "y": torch.zeros(count)}


def frozen(norm: nn.Module) -> Normed:
    """A model in training mode, its norm in eval mode."""
    model = Normed(norm).train()
    norm.eval()
    return model


def analyze_model(build: Callable[[], nn.Module]) -> mw.AnalyzedModel:
    return mw.analyze(build, samples(4), loss=LOSS)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Normed(nn.BatchNorm1d(6)), "then norm.eval()"),
        (lambda: Normed(nn.BatchNorm1d(6)).eval(), "then norm.eval()"),
        (lambda: Normed(nn.SyncBatchNorm(6)), "SyncBatchNorm communicates outside the plan"),
        (
            lambda: Normed(nn.BatchNorm1d(6, track_running_stats=False)),
            "without running statistics they cannot be frozen",
        ),
        (
            lambda: frozen(nn.BatchNorm1d(6, track_running_stats=False)),
            "without running statistics they cannot be frozen",
        ),
    ],
    ids=["training", "model in eval mode is trained", "sync", "no statistics", "no statistics, frozen"],
)
def test_a_norm_that_would_see_a_part_of_the_batch_is_refused_with_what_to_do(
    build: Callable[[], nn.Module], message: str
):
    analyzed = analyze_model(build)
    for mesh, micro_batch in ((mw.Mesh(dp_replicate=3), 0), (mw.Mesh(), 4)):
        with pytest.raises(PlanError) as caught:
            mw.make_plan(analyzed, tiny_job(), mesh, micro_batch=micro_batch)
        assert "1 batch norms (norm...) would take statistics of a part of the global batch" in str(
            caught.value
        )
        assert message in str(caught.value)
    assert (
        mw.make_plan(analyzed, tiny_job()).num_microbatches == 1
    )  # on one device at once it is what it always was


def test_a_norm_that_would_see_some_of_the_tokens_is_refused():
    strategies = (TokenSharding(), DDP(axis="cp"))
    with pytest.raises(
        PlanError, match=r"take statistics of a part of the global batch \(3 ranks x 1 microbatches\)"
    ):
        mw.make_plan(analyze_model(lambda: Normed(nn.BatchNorm1d(6))), tiny_job(), mw.Mesh(cp=3), strategies)


def test_frozen_statistics_equal_one_device():
    def build() -> nn.Module:
        return frozen(nn.BatchNorm1d(6))

    analyzed = analyze_model(build)
    plan = mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=3), micro_batch=2)
    data = samples()
    verdict = mw.verify(
        analyzed, plan, [{key: value[i : i + 12] for key, value in data.items()} for i in (0, 12)], loss=LOSS
    )
    assert verdict.passed, str(verdict)


def test_only_norms_that_mix_samples_are_found():
    model = nn.Sequential(
        nn.LayerNorm(3), nn.BatchNorm1d(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3), nn.BatchNorm2d(3)
    )
    model[4].eval()
    assert list(batch_coupled_norms(model)) == ["1"]


@pytest.mark.parametrize(
    "spectral", [parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"]
)
def test_a_spectral_norm_goes_on_once_in_a_step(spectral: Callable[[nn.Module], nn.Module]):
    analyzed = mw.analyze(Normed(spectral(nn.Linear(6, 6))), samples(4), loss=LOSS)
    with pytest.raises(
        PlanError, match=r"1 spectral norms \(norm.*\) iterate in every forward: 3 microbatches"
    ):
        mw.make_plan(analyzed, tiny_job(), micro_batch=4)
    verdict = mw.verify(
        analyzed, mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=2)), [samples(12)], loss=LOSS
    )
    assert verdict.passed, verdict


def test_a_spectral_norm_of_the_old_kind_has_no_shards():
    analyzed = mw.analyze(Normed(nn.utils.spectral_norm(nn.Linear(6, 6))), samples(4), loss=LOSS)
    with pytest.raises(PlanError, match=r"use torch.nn.utils.parametrizations.spectral_norm"):
        mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_shard=2))
