"""The schedule drawing of a run: only for pipelines, planned only without a trace, and none for a damaged
file.
"""

from dataclasses import replace

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.report.timeline.gantt_svg import schedule_svg
from meshwright.report.timeline.pipeline_stages import stage_block_calls
from meshwright.report.timeline.run_folder_reader import RunRecord
from tests.tiny_model import analyzed_model, plan_of, tiny_job

ANALYZED = analyzed_model()


def record() -> RunRecord:
    plan = make_plan(ANALYZED, tiny_job(batch=4), Mesh(pp=2), (Pipeline(),), 1)
    about = {"world": 2, "stages": [list(part) for part in stage_block_calls(plan)]}
    return RunRecord("run", [], [], {}, about, plan.program)


def test_without_a_trace_the_plan_is_drawn_to_the_scale_of_its_operations():
    drawn = schedule_svg(record())
    assert "planned: " in drawn
    assert "operations" in drawn
    assert "measured" not in drawn


def test_whole_models_and_older_runs_have_no_drawing():
    whole = plan_of(ANALYZED, 2)
    assert schedule_svg(replace(record(), program=whole.program)) == ""
    assert schedule_svg(replace(record(), run_info={"world": 2})) == ""
    assert schedule_svg(replace(record(), program=None)) == ""


def test_a_program_that_cannot_be_played_is_not_drawn():
    stuck = record().program.edit(lambda actions: [replace(each, waits=("NOBODY()",)) for each in actions])
    assert schedule_svg(replace(record(), program=stuck)) == ""
