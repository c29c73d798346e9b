"""What a plan says of itself where every micro-batch is an update of its own."""

from dataclasses import replace

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipedream import PipeDream
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.plan.job.job import TrainConfig
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.terminal.plan_table import plan_summary
from tests.tiny_model import reading_of, tiny_job

JOB = replace(tiny_job(), train=TrainConfig(batch=12, clip=0.0))


def test_it_says_how_old_weights_are_and_what_is_kept_of_them():
    said = plan_summary(make_plan(reading_of(), JOB, Mesh(pp=3), (PipeDream(),), 1))
    assert said["not exact"] == "pipedream does not compute what one device computes"
    updates = (
        "12, one per micro-batch, with gradients at weights that are up to 2, 1, 0 updates old, by stage"
    )
    assert said["updates per step"] == updates
    assert said["old weights kept"].startswith("2 (")
    assert said["old weights kept"].endswith(", none, by stage")


def test_an_exact_plan_says_nothing_of_it():
    said = plan_summary(make_plan(reading_of(), JOB, Mesh(pp=3), (Pipeline(),), 1))
    assert not {"not exact", "updates per step", "old weights kept"} & said.keys()
