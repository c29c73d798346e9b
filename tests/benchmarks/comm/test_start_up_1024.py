"""Splits counted at ranks that do not exist are those of the plan, and a group of its own fails the claim."""

from unittest.mock import patch

import pytest

from benchmarks.comm import start_up_1024
from benchmarks.pipeline.pipeline_models import TOKENS, analyzed_model
from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.data_config import DataConfig
from meshwright.plan.job.job import Job, TrainConfig
from meshwright.plan.job.model_config import ModelConfig
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh


@pytest.fixture(scope="module")
def plan() -> Plan:
    job = Job(ModelConfig("llama"), DataConfig("random", sequence=TOKENS), TrainConfig(batch=64))
    strategies = (BatchSplit(), Pipeline(schedule="1f1b"), DDP())
    return make_plan(analyzed_model("llama", 8), job, Mesh(pp=4, dp_replicate=8), strategies, 1)


def test_every_rank_takes_part_in_one_split_per_set_of_axes_and_four_for_pairs(plan: Plan) -> None:
    share, counted = start_up_1024.row("llama", plan)
    assert share == 1.0
    assert (counted["axis_splits"], counted["pair_splits"], counted["splits"]) == (2, 4, 6)
    assert counted["groups"] == 4 + 8 + 2 * 3 * 8, "calls, if each group were made by itself"
    assert counted["calls_by_rank"]["0"] == {"split_group": 6, "send": 1, "recv": 1}
    assert counted["calls_by_rank"]["15"] == {"split_group": 6, "send": 2, "recv": 2}


def test_groups_that_are_made_one_by_one_fail_the_claim(plan: Plan) -> None:
    with (
        patch("meshwright.comm.world.communicator_splits", return_value=[]),
        pytest.raises(RuntimeError, match="new_group is collective"),
    ):
        start_up_1024.count_calls(plan, 0)
