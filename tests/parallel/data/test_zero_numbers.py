"""Every ZeRO stage equals one device, alone and with replicas, with tied, frozen and unused weights and
dropout.
"""

import pytest

from meshwright.api import make_plan
from meshwright.comm.collectives.group import World
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.strategy_interface import Strategy
from meshwright.testing.ranks import ProcessPool
from meshwright.verifier.static_checks import static_checks
from tests.tiny_model import analyzed_model, case_of, executor_of, tiny_job, token_samples, verdict_of

OPTIONS = [{}, {"tied": True}, {"spare": True}, {"frozen": True}, {"p": 0.3}, {"tied": True, "frozen": True}]
SHARD = BatchSplit(axis="dp_shard")


def sharded(
    analyzed: AnalyzedModel, ranks: int, zero: Strategy, micro_batch: int = 0, job: Job | None = None
) -> Plan:
    return make_plan(analyzed, job or tiny_job(), Mesh(dp_shard=ranks), (SHARD, zero), micro_batch)


@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 0), (3, 0), (3, 2), (3, 1)])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_it_equals_one_device(options: dict[str, float | bool], stage: int, ranks: int, micro_batch: int):
    analyzed = analyzed_model(**options)
    plan = sharded(analyzed, ranks, ZeRO(stage=stage), micro_batch)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize(
    "zero",
    [
        ZeRO(gather="microbatch"),
        ZeRO(gather="step"),
        ZeRO(prefetch=0),
        ZeRO(prefetch=3),
        ZeRO(keep_mb=0.0005),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"tied": True}], ids=str)
def test_it_equals_one_device_for_every_unshard_window(options: dict[str, bool], zero: ZeRO):
    analyzed = analyzed_model(**options)
    plan = sharded(analyzed, 3, zero, 2)
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [0, 1])
def test_shards_over_replicas_equal_one_device(stage: int, micro_batch: int):
    analyzed = analyzed_model(tied=True)
    mesh = Mesh(dp_replicate=2, dp_shard=3)
    plan = make_plan(
        analyzed,
        tiny_job(),
        mesh,
        (BatchSplit(), SHARD, ZeRO(stage=stage, replicate_axis="dp_replicate")),
        micro_batch,
    )
    assert static_checks(plan) == []
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_than_a_weight_has_elements(stage: int):
    analyzed = analyzed_model()
    plan = sharded(analyzed, 12, ZeRO(stage=stage))
    verdict = verdict_of(case_of(analyzed, plan))
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_processes_equal_threads(process_pool: ProcessPool, stage: int):
    verdict = process_pool.run(on_a_process, Mesh(dp_shard=3), stage)
    assert len({str(each) for each in verdict}) == 1


def on_a_process(world: World, stage: int) -> list[float]:
    analyzed = analyzed_model(tied=True)
    executor = executor_of(analyzed, sharded(analyzed, 3, ZeRO(stage=stage), 2), world)
    return [
        executor.step({k: v[4 * world.rank : 4 * world.rank + 4] for k, v in token_samples().items()}).loss
        for _ in range(3)
    ]
