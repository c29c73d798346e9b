"""Stored weights from Python: a model that starts from them, and ranks that export what they trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import OptimizerConfig, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.job.precision import PrecisionConfig
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import run_on_threads
from tests.model.published_models import logits, published

JOB = mw.Job(ModelConfig("mine"), DataConfig("mine"), TrainConfig(steps=2, batch=6), OptimizerConfig(lr=0.01))


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.arange(6 * 5).view(6, 5).remainder(40)
    return {"input_ids": tokens, "labels": tokens}


def test_three_ranks_start_from_weights_and_the_first_writes_what_they_trained(tmp_path: Path):
    theirs = published(tmp_path / "in")
    analyzed = mw.analyze(
        lambda: transformers.LlamaForCausalLM(theirs.config), batch(), weights=str(tmp_path / "in")
    )
    plan = mw.make_plan(analyzed, JOB, mw.Mesh(dp_replicate=3))
    before = {name: value.detach().clone() for name, value in theirs.named_parameters()}

    def rank(world: World) -> tuple[bool, object, dict[str, torch.Tensor]]:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            started = all(
                torch.equal(value, before[name]) for name, value in trainer.module.named_parameters()
            )
            trainer.step(trainer.local_batch(batch()))
            written = trainer.export(tmp_path / "out")
            return (
                started,
                written,
                {name: value.detach().clone() for name, value in trainer.module.named_parameters()},
            )

    first, *others = run_on_threads(rank, plan.mesh)
    assert all(started for started, _, _ in (first, *others))
    assert first[1].round_trip.passed
    assert [written for _, written, _ in others] == [None, None]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert all(torch.equal(value, first[2][name]) for name, value in loaded.named_parameters())
    assert not torch.equal(logits(loaded), logits(theirs))


@pytest.mark.parametrize(
    "strategies", [(BatchSplit(), DDP()), (BatchSplit(), ZeRO(axis="dp_replicate", stage=3))]
)
def test_weights_with_master_weights_are_exported_in_full_precision(
    tmp_path: Path, strategies: tuple[Strategy, ...]
):
    theirs = published(tmp_path / "in")
    analyzed = mw.analyze(
        lambda: transformers.LlamaForCausalLM(theirs.config), batch(), weights=str(tmp_path / "in")
    )
    precision = PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32")
    plan = mw.make_plan(analyzed, replace(JOB, precision=precision), mw.Mesh(dp_replicate=3), strategies)

    def rank(world: World) -> dict[str, torch.Tensor]:
        with mw.parallelize(analyzed, plan, world=world) as trainer:
            trainer.step(trainer.local_batch(batch()))
            trainer.export(tmp_path / "out", torch.float32)
            return trainer.executor.gather_parameters()

    rounded, *_ = run_on_threads(rank, plan.mesh)
    loaded = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[name].bfloat16(), value) for name, value in rounded.items())
    assert any(not torch.equal(loaded[name].double(), value.double()) for name, value in rounded.items())


def test_a_plan_s_hash_names_the_stored_values(tmp_path: Path):
    hashes = set()
    for seed in (1, 2):
        theirs = published(tmp_path / str(seed), seed=seed)
        analyzed = mw.analyze(
            lambda config=theirs.config: transformers.LlamaForCausalLM(config),
            batch(),
            weights=str(tmp_path / str(seed)),
        )
        hashes.add(mw.make_plan(analyzed, JOB).hash)
    drawn = mw.analyze(lambda: transformers.LlamaForCausalLM(theirs.config), batch())
    assert len(hashes | {mw.make_plan(drawn, JOB).hash}) == 3
