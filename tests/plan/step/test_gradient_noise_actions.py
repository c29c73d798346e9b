"""Actions that measure the gradient noise, and jobs in which nothing can be compared."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.data_parallel_master import DataParallelMaster
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.data.ddp_naive import NaiveDDP
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action
from tests.engine.two_tower_model import analyzed_towers, towers_plan
from tests.paper_model import FIRST_ROLE
from tests.parallel.data.tokenwise_model import TokenSharding
from tests.tiny_model import analyzed_model, plan_of, tiny_job

KINDS = ("GRAD_SQNORM", "REDUCE_SQNORM", "NOISE_SCALE")
ANALYZED = analyzed_model()
STORED = [(BatchSplit(), DDP()), (BatchSplit(), DDP(bucket_mb=1e-4)), (BatchSplit(), NaiveDDP())]


def noisy(**changes: object) -> Job:
    job = tiny_job(**changes)
    return replace(job, train=replace(job.train, noise_scale=True))


def actions(plan: Plan) -> list[Action]:
    return list(plan.program.actions(FIRST_ROLE))


@pytest.mark.parametrize("strategies", STORED)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(3, 2), (1, 3)])
def test_without_it_the_program_has_no_such_action_and_with_it_nothing_else_changes(
    strategies, ranks: int, micro_batch: int
):
    plain = plan_of(ANALYZED, ranks, strategies, micro_batch)
    plan = plan_of(ANALYZED, ranks, strategies, micro_batch, noisy())
    assert not any(action.kind in KINDS for action in actions(plain))
    rest = [
        replace(action, waits=tuple(wait for wait in action.waits if not wait.startswith(KINDS)))
        for action in actions(plan)
        if action.kind not in KINDS
    ]
    assert rest == actions(plain)
    assert plan.hash != plain.hash


@pytest.mark.parametrize("strategies", STORED)
def test_each_gradient_is_measured_once_and_before_it_is_summed(strategies):
    listed = actions(plan_of(ANALYZED, 3, strategies, 2, noisy()))
    places = {action.name: place for place, action in enumerate(listed)}
    measured = [name for action in listed if action.kind == "GRAD_SQNORM" for name in action.tensors]
    assert sorted(measured) == sorted(param.name for param in ANALYZED.model_spec.trainable)
    for action in listed:
        if action.kind == "REDUCE":
            assert f"GRAD_SQNORM({action.subject})" in action.waits
            assert places[f"GRAD_SQNORM({action.subject})"] < places[action.name]
    assert places["REDUCE_SQNORM()"] < places["CLIP()"] < places["STEP()"] < places["NOISE_SCALE()"]


def test_a_single_rank_measures_after_the_first_micro_batch_and_sends_nothing():
    listed = actions(plan_of(ANALYZED, 1, micro_batch=4, job=noisy()))
    names = [action.name for action in listed]
    assert names.index("GRAD_SQNORM()") == names.index("B(embed, 0)") + 1 == names.index("F(embed, 1)") - 1
    assert not any(action.transfer for action in listed)


def test_one_batch_size_alone_is_refused():
    for micro_batch in (0, 12):
        with pytest.raises(PlanError) as caught:
            plan_of(ANALYZED, 1, micro_batch=micro_batch, job=noisy())
        text = str(caught.value)
        assert (
            "one data rank runs the 12 samples of a step as one microbatch: there is no smaller batch" in text
        )
        assert "set micro_batch to a smaller divisor of train.batch, raise mesh.dp_replicate, or set" in text


def test_a_rank_that_steps_for_others_is_refused():
    with pytest.raises(
        PlanError,
        match=r'train\.noise_scale(?s:.*)use the strategy "ddp", or set train\.noise_scale = false',
    ):
        plan_of(ANALYZED, 3, (BatchSplit(), DataParallelMaster()), job=noisy())


def test_a_loss_of_the_whole_batch_is_refused():
    with pytest.raises(PlanError, match="the gradient of a part is not that of a smaller batch"):
        towers_plan(analyzed_towers(), Mesh(dp_replicate=3), job=noisy())


def test_context_parallelism_is_refused():
    strategies = (BatchSplit(), TokenSharding(), DDP())
    with pytest.raises(
        PlanError,
        match=r"ranks along cp have different tokens.*: no rank has the gradient of a part of the batch",
    ):
        make_plan(ANALYZED, noisy(), Mesh(dp_replicate=2, cp=2), strategies)
    make_plan(ANALYZED, noisy(), Mesh(dp_replicate=2), strategies)
