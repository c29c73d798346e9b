"""PipeDream refuses all that needs one step per batch, and weights that stages share."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.zero import ZeRO
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import Job, LossGuard, PrecisionConfig, TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.sharding_plan import ShardingPlan
from meshwright.plan.strategy_interface import Strategy
from tests.parallel.pipeline.test_pipedream_trains import EACH, NUM_SAMPLES, planned
from tests.parallel.pipeline.test_pipeline_strategy import JOB
from tests.parallel.tensor.odd_llama import analyzed_llama
from tests.tiny_model import analyzed_model


@pytest.mark.parametrize(
    ("job", "mesh", "beside", "message"),
    [
        (JOB, Mesh(pp=2), (), "train.clip = 0.5: every microbatch is an update of its own"),
        (replace(EACH, guard=LossGuard("skip")), Mesh(pp=2), (), "the loss guard needs whole steps"),
        (
            replace(EACH, train=TrainConfig(batch=NUM_SAMPLES, clip=0.0, noise_scale=True)),
            Mesh(pp=2),
            (),
            "the noise scale needs whole gradients",
        ),
        (
            replace(EACH, precision=PrecisionConfig(compute="float16")),
            Mesh(pp=2),
            (),
            "the loss is scaled for float16",
        ),
        (
            EACH,
            Mesh(pp=2, dp_shard=2),
            (BatchSplit(axis="dp_shard"), ZeRO()),
            "weights are cut into shards along dp_shard",
        ),
        (EACH, Mesh(pp=2), (Pipeline(),), "pipedream and pipeline both decide the order"),
        (EACH, Mesh(), (), "a pipeline of one rank"),
    ],
)
def test_what_needs_one_step_per_batch_is_refused(
    job: Job, mesh: Mesh, beside: tuple[Strategy, ...], message: str
):
    with pytest.raises(PlanError, match=message):
        planned(analyzed_llama(), mesh, *beside, job=job)


def test_weights_that_parts_share_are_refused():
    with pytest.raises(PlanError, match="used by stages on several ranks, whose copies would diverge"):
        planned(analyzed_model(tied=True), Mesh(pp=2))


def test_a_loss_of_the_whole_batch_is_refused():
    analyzed = analyzed_model()
    whole = replace(analyzed.model_spec, needs_global_batch=True)
    assert any(
        "on the whole batch at once" in fault.problem
        for fault in PipeDream().check(EACH, ShardingPlan.one_device(Mesh(pp=2), whole))
    )


def test_wrong_cuts_are_told_in_its_own_name():
    with pytest.raises(PlanError, match=r"strategies.pipedream.split_points: 2 split points make 3 stages"):
        make_plan(
            analyzed_llama(),
            EACH,
            Mesh(pp=2),
            (PipeDream(split_points=("model.layers.1", "model.layers.2")),),
            1,
        )
