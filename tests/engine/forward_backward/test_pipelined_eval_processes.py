"""Pipelined evaluation and forwards outside of steps on processes, where a message is only valid after its
wait.
"""

import pytest
import torch

from meshwright.api import make_plan, parallelize
from meshwright.comm.backends.threads import single_rank_world
from meshwright.comm.collectives.group import World
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import LossGuard
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool
from tests.engine.one_device import sample_range
from tests.tiny_model import analyzed_model, tiny_job, token_samples

LAYOUTS: dict[str, tuple[Mesh, tuple[Strategy, ...]]] = {
    "three stages": (Mesh(pp=3), (Pipeline(),)),
    "two virtual stages on each of two ranks": (
        Mesh(pp=2),
        (Pipeline(schedule="interleaved", virtual_stages=2),),
    ),
    "shards": (Mesh(pp=2, dp_shard=2), (Pipeline(), BatchSplit(axis="dp_shard"), ZeRO())),
}
DATA = token_samples(30)


def evaluations_of(world: World, layout: str) -> dict[str, list[float]]:
    """Losses of evaluations before steps, logits, and what is said of a step that is judged to do harm."""
    mesh, strategies = LAYOUTS[layout] if layout else (Mesh(), ())
    job = tiny_job(guard=LossGuard("skip", factor=1.01, window=2))
    analyzed = analyzed_model()
    plan = make_plan(analyzed, job, mesh, strategies, 2)
    with parallelize(analyzed, plan, world=world) as engine:
        found: dict[str, list[float]] = {"losses": [], "logits": [], "suspects": []}
        for first in (0, 0, 12):  # the third is new to it
            mine = [engine.local_batch(sample_range(DATA, at, min(at + 12, 30))) for at in (0, 12, 24)]
            found["losses"].append(
                engine.executor.evaluate([each if len(each["labels"]) else None for each in mine]).loss
            )
            metrics = engine.step(engine.local_batch(sample_range(DATA, first, first + 12)))
        if metrics.spike is not None:
            found["suspects"] = [
                sum(each.grad_norm**2 for each in metrics.spike.rank_reports),
                metrics.spike.rank_reports[0].loss,
            ]
        with engine.full_params() as module:
            found["logits"] = module(DATA["input_ids"][:2]).view(-1).tolist()
        return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_equals_one_device(process_pool: ProcessPool, layout: str):
    expected = evaluations_of(single_rank_world(torch.device("cpu")), "")
    for found in process_pool.run(evaluations_of, LAYOUTS[layout][0], layout):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert found["logits"] == pytest.approx(expected["logits"], rel=1e-10)
        assert bool(found["suspects"]) == bool(expected["suspects"])
        if layout != "shards":
            norms = [found["suspects"][0] / LAYOUTS[layout][0].pp, found["suspects"][1]]
            assert norms == pytest.approx(expected["suspects"], rel=1e-9)
