"""Versions of weights on processes, where a message is there only when it has been waited for."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.loss.token_cross_entropy import token_cross_entropy
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.run.training.trainer import select_local_batch
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.float64_parity_setup import make_parity_case
from meshwright.verifier.parity import RankReport, compare_rank
from meshwright.verifier.reference import run_reference
from tests.tiny_model import analyzed_model, tiny_job, token_samples

STEPS = 2


def compared(world: World, ranks: int) -> RankReport:
    analyzed, job = analyzed_model(), replace(tiny_job(), train=TrainConfig(batch=12, clip=0.0))
    plan = make_plan(analyzed, job, Mesh(pp=ranks), (PipeDream(),), 1)
    batches = [token_samples(12) for _ in range(STEPS)]
    case = make_parity_case(
        analyzed,
        plan,
        token_cross_entropy(),
        lambda plan, rank: lambda step: select_local_batch(batches[step], plan, rank),
    )
    return compare_rank(case, world, run_reference(case, STEPS))


@pytest.mark.parametrize("ranks", [3])
def test_it_equals_the_replay_on_processes(process_pool: ProcessPool, ranks: int):
    reports = process_pool.run(compared, Mesh(pp=ranks), ranks)
    assert [(report.differences, report.num_steps) for report in reports] == [([], STEPS)] * ranks
    assert len({tuple(report.digests.items()) for report in reports}) == 1
