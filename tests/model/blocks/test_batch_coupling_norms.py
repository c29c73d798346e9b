"""Batch norms are refused where each rank would see a part of the batch, and accepted elsewhere."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import meshwright as mw
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
        (lambda: Normed(nn.BatchNorm1d(6)), 'name = "sync_batch_norm"; or .*then norm.eval'),
        (lambda: Normed(nn.BatchNorm1d(6)).eval(), 'name = "sync_batch_norm"; or .*then norm.eval'),
        (lambda: Normed(nn.SyncBatchNorm(6)), 'name = "sync_batch_norm"'),
        (lambda: Normed(untracked()), "set track_running_stats=True, and add .* or use group or layer norm$"),
        (lambda: frozen(untracked()), "set track_running_stats=True, and add .* or use group or layer norm$"),
    ],
    ids=["training", "model in eval mode is trained", "sync", "no statistics", "no statistics, frozen"],
)
def test_a_norm_that_would_see_a_part_of_the_batch_is_refused_with_what_to_do(
    build: Callable[[], nn.Module], message: str
):
    analyzed, strategies = analyze_model(build), (mw.BatchSplit(), mw.DDP())
    part = r"1 batch norms \(norm...\) would take statistics of a part of the global batch"
    with pytest.raises(PlanError, match=f"{part}(?s:.*){message}"):
        mw.make_plan(analyzed, tiny_job(), mw.Mesh(dp_replicate=3), strategies)
    with pytest.raises(PlanError, match=f"{part}(?s:.*)micro_batch = 0"):
        mw.make_plan(analyzed, tiny_job(), micro_batch=4)
    assert (
        mw.make_plan(analyzed, tiny_job()).num_microbatches == 1
    )  # on one device at once it is what it always was


def untracked() -> nn.Module:
    return nn.BatchNorm1d(6, track_running_stats=False)


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
    def build() -> nn.Module:
        norms = [nn.LayerNorm(4), nn.BatchNorm1d(4), nn.GroupNorm(1, 4), nn.InstanceNorm1d(4)]
        return nn.Sequential(*norms, nn.BatchNorm1d(4).eval())

    analyzed = mw.analyze(build, {"input": torch.randn(4, 4, 4), "y": torch.zeros(4)}, loss=LOSS)
    assert [call.name for call in analyzed.model_spec.batch_norm_calls] == ["1"]


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
