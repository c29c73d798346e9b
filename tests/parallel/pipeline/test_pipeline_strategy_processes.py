"""Stages on processes, where a sum is there only when it has been waited for."""

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from tests.tiny_model import analyzed_model, tiny_job, token_samples

MESHES = {
    "three stages": Mesh(pp=3),
    "stages in shards": Mesh(pp=2, dp_shard=2),
    "backwards in halves": Mesh(pp=2),
    "there and back": Mesh(pp=2, dp_shard=2),
    "tied, in shards": Mesh(pp=2, dp_shard=2),
    "tied, of three": Mesh(pp=3),
    "every stage twice": Mesh(pp=2, dp_shard=2),
}
SCHEDULES = {"backwards in halves": "zb_h1", "there and back": "zb_v", "every stage twice": "dualpipe"}
STEPS = 2


def compared(world: World, name: str) -> RankReport:
    analyzed, mesh = (
        analyzed_model(tied=name in ("tied, in shards", "tied, of three", "every stage twice")),
        MESHES[name],
    )
    shards = (BatchSplit(axis="dp_shard"), ZeRO(stage=2)) if mesh.dp_shard > 1 else ()
    plan = make_plan(analyzed, tiny_job(), mesh, (Pipeline(schedule=SCHEDULES.get(name, "1f1b")), *shards), 1)
    batches = [token_samples(plan.job.train.batch) for _ in range(STEPS)]
    case = make_parity_case(
        analyzed,
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(batches[step], plan, rank),
    )
    return compare_rank(case, world, run_reference(case, STEPS))


@pytest.mark.parametrize("name", MESHES)
def test_it_equals_one_device_on_processes(process_pool: ProcessPool, name: str):
    reports = process_pool.run(compared, MESHES[name], name)
    assert [(report.differences, report.num_steps) for report in reports] == [([], STEPS)] * MESHES[
        name
    ].world_size
    assert len({tuple(report.digests.items()) for report in reports}) == 1
