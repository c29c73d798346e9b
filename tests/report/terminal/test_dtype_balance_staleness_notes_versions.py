"""Notes of a plan with asynchronous updates: how old weights are, and which versions are kept."""

from dataclasses import replace

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.action_table import plan_summary
from tests.tiny_model import analyzed_model, tiny_job

JOB = replace(tiny_job(), train=TrainConfig(batch=12, clip=0.0))


def test_it_says_how_old_weights_are_and_what_is_kept_of_them():
    summary = plan_summary(make_plan(analyzed_model(), JOB, Mesh(pp=3), (PipeDream(),), 1))
    assert summary["not exact"] == "pipedream does not compute the same as one device"
    updates = "12, one per microbatch, with gradients at weights that are up to 2, 1, 0 updates old, by stage"
    assert summary["updates per step"] == updates
    assert summary["stashed weights"].startswith("2 (")
    assert summary["stashed weights"].endswith(", none, by stage")


def test_an_exact_plan_says_nothing_of_it():
    summary = plan_summary(make_plan(analyzed_model(), JOB, Mesh(pp=3), (Pipeline(),), 1))
    assert not {"not exact", "updates per step", "stashed weights"} & summary.keys()
