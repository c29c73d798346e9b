"""Gathering the full model from pipeline stages: every rank gets the weights and buffers of one device."""

import pytest
import torch

from meshwright.api import analyze, make_plan, parallelize, verify
from meshwright.comm.collectives.group import World
from meshwright.engine.step import broadcast_stage_params
from meshwright.engine.step.broadcast_stage_params import gather_full_buffers
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import PrecisionConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.engine.forward_backward.test_pipelined_eval import Skips
from tests.engine.one_device import sample_range
from tests.tiny_model import Tiny, tiny_job, token_samples

DATA = token_samples(4)


def gathered_on_ranks(mesh: Mesh) -> list[dict[str, torch.Tensor]]:
    """Weights and buffers after a step, as each rank tells them."""
    analyzed = analyze(Skips, sample_range(DATA, 0, 2))
    plan = make_plan(analyzed, tiny_job(batch=4), mesh, (Pipeline(),) if mesh.pp > 1 else (), 4)

    def rank(world: World) -> dict[str, torch.Tensor]:
        with parallelize(analyzed, plan, world=world) as engine:
            engine.step(engine.local_batch(DATA))
            return engine.executor.gather_parameters() | gather_full_buffers(engine.executor.state, "TEST")

    return run_on_threads(rank, mesh)


@pytest.mark.parametrize("ranks", [2, 3])
def test_statistics_of_a_layer_come_from_the_rank_that_computes_them(ranks: int):
    (expected,) = gathered_on_ranks(Mesh())
    assert expected["layers.3.1.num_batches_tracked"] == 1
    for found in gathered_on_ranks(Mesh(pp=ranks)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def frozen() -> Skips:
    """Nothing of its first two parts is trained."""
    model = Skips()
    for module in (model.embed, *model.layers[:4]):
        module.requires_grad_(False)
    return model


def test_a_rank_that_trains_nothing_gets_the_gradients_of_the_others():
    analyzed = analyze(frozen, sample_range(DATA, 0, 2))
    plan = make_plan(analyzed, tiny_job(batch=4), Mesh(pp=3), (Pipeline(),), 4)
    verdict = verify(analyzed, plan, [DATA] * 2)
    assert not plan.for_rank(0).view.model_spec.trainable
    assert verdict.passed, verdict


def test_master_and_frozen_weights_are_gathered_in_their_dtypes():
    def made() -> Tiny:
        model = Tiny()
        model.embed.requires_grad_(False)
        return model

    analyzed = analyze(made, sample_range(DATA, 0, 2))
    job = tiny_job(batch=4, precision=PrecisionConfig("bfloat16", "bfloat16", "float32", master="float32"))
    plan = make_plan(analyzed, job, Mesh(pp=2), (Pipeline(split_points=("layers.0",)),), 4)

    def rank(world: World) -> dict[str, torch.Tensor]:
        with parallelize(analyzed, plan, world=world) as engine:
            engine.step(engine.local_batch(DATA))
            return engine.executor.gather_parameters(use_masters=True)

    first, second = run_on_threads(rank, plan.mesh)
    assert {name for name, each in first.items() if each.dtype == torch.bfloat16} == {"embed.weight"}
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_buffers_that_are_not_sent_are_noticed(monkeypatch):
    monkeypatch.setattr(broadcast_stage_params, "persistent_buffers", lambda module: iter(()))
    (expected,) = gathered_on_ranks(Mesh())
    monkeypatch.undo()
    assert gathered_on_ranks(Mesh(pp=2))[0].keys() - expected.keys() >= {
        "layers.0.1.running_mean",
        "layers.3.1.running_var",
    }
