"""The load of experts is that of the global batch: the same integers under every plan."""

from functools import cache

import pytest
import torch

import meshwright as mw
from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.expert_load import ExpertLoad
from meshwright.testing.ranks import run_on_threads
from tests.engine.late_copies import LateCopies
from tests.parallel.expert.mixture_model import analyzed_mixtral, batch_of, sgd_job

NUM_EXPERTS = 5
PLANS = {
    "one device, microbatches, recomputed": (mw.Mesh(), (mw.ActivationCheckpointing(),), 4),
    "ep": (mw.Mesh(ep=3), None, 2),
    "without ep": (mw.Mesh(dp_replicate=2, tp=2), None, 0),
    "cp": (mw.Mesh(ep=2, cp=3), None, 0),
    "1f1b": (mw.Mesh(pp=2, ep=2), None, 2),
    "master": (mw.Mesh(dp_replicate=2), (mw.BatchSplit(), mw.DataParallelMaster()), 0),
}


def loads_of_steps(plan: mw.Plan, world: World, sizes: tuple[int, ...]) -> list[tuple[ExpertLoad, ...]]:
    """The loads of one step per batch, with an evaluation before each."""
    found = list[tuple[ExpertLoad, ...]]()
    with mw.parallelize(analyzed_mixtral(NUM_EXPERTS), plan, world=world) as trainer:
        for seed, size in enumerate(sizes):
            batch = trainer.local_batch(batch_of(size, seed))
            trainer.evaluate([batch])
            found.append(trainer.step(batch).expert_loads)
    return found


@cache
def routed() -> tuple[ExpertLoad, ...]:
    """The choices of the routers in one forward on one device, before it is trained."""
    chosen = list[torch.Tensor]()
    analyzed = analyzed_mixtral(NUM_EXPERTS)
    with mw.parallelize(analyzed, mw.make_plan(analyzed, sgd_job(), mw.Mesh())) as trainer:
        for layer in trainer.executor.state.trained_module.module.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].flatten()))
        trainer.step(trainer.local_batch(batch_of(12)))
    counts = [tuple(each.bincount(minlength=NUM_EXPERTS).tolist()) for each in chosen]
    return tuple(
        ExpertLoad(f"model.layers.{layer}.mlp.experts", each, 0) for layer, each in enumerate(counts)
    )


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_knows_the_load_of_the_global_batch(name: str):
    mesh, strategies, micro_batch = PLANS[name]
    plan = mw.make_plan(analyzed_mixtral(NUM_EXPERTS), sgd_job(), mesh, strategies, micro_batch)
    found = run_on_threads(lambda world: loads_of_steps(plan, world, (12,)), plan.mesh)
    assert found == [[routed()]] * plan.mesh.world_size


def test_dummies_of_a_short_batch_do_not_count():
    plan = mw.make_plan(analyzed_mixtral(NUM_EXPERTS), sgd_job(), mw.Mesh(ep=3), None, 2)
    found = run_on_threads(lambda world: loads_of_steps(plan, world, (12, 5)), plan.mesh)
    for before, after in found:
        assert {sum(load.counts) for load in before} == {12 * 7 * 2}
        assert {sum(load.counts) for load in after} == {5 * 7 * 2}


def test_nothing_is_read_from_the_device_within_the_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("meshwright.engine.runtime.rank_state.DeviceCopies", LateCopies)
    plan = mw.make_plan(analyzed_mixtral(NUM_EXPERTS), sgd_job(), mw.Mesh())
    with mw.parallelize(analyzed_mixtral(NUM_EXPERTS), plan) as trainer:
        copies = trainer.executor.state.copies
        metrics = trainer.step(trainer.local_batch(batch_of(12)))
        assert copies.reads == []
        assert metrics.expert_loads == routed()
        assert len(copies.reads) == 1
