"""Roles: which ranks play which, what a rank sees, and a role outside of the mesh that every reader takes."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from meshwright.api import make_plan
from meshwright.parallel.data.batch_split import BatchSplit
from meshwright.parallel.data.ddp import DDP
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Allocation, Program, Role
from meshwright.plan.step.program_json import program_from_dict, program_to_dict
from meshwright.plan.step.simulator import SimulationDeadlock, simulate
from meshwright.planner.program_cost.prediction import predict_step
from meshwright.planner.program_cost.rank_memory import peak_nbytes_by_category, state_bytes, transient_nbytes
from meshwright.report.html.run_page import run_page
from meshwright.report.terminal.action_table import plan_details, plan_summary
from meshwright.report.terminal.data_line import DataSummary
from meshwright.report.terminal.memory_and_sent_bytes import fullest_rank, state_nbytes_by_role
from meshwright.report.terminal.plan_overview import PlanOverview
from meshwright.report.terminal.prediction import prediction_dict, prediction_view
from meshwright.report.timeline.gantt_svg import schedule_svg
from meshwright.report.timeline.pipeline_stages import simulated_spans
from meshwright.report.timeline.planned_vs_measured_spans import step_timeline
from meshwright.report.timeline.run_folder_reader import RunRecord, read_run_record
from meshwright.run.telemetry.run_info import write_run_info
from meshwright.verifier.static_checks import static_checks
from tests.planner.simple_machine import ground
from tests.tiny_model import analyzed_model, plan_of, tiny_job

ANALYZED = analyzed_model()
WATCH = Action("WATCH", waits=("pp1/LOSS_SUM()",), flops=1000, allocations=(Allocation("loss history", 64),))
WRITE = Action("WRITE", waits=("WATCH()",), frees=("loss history",))


def pipelined(pp: int = 2) -> Plan:
    mesh, strategies = Mesh(pp=pp, dp_replicate=3), (Pipeline(), BatchSplit(), DDP())
    return make_plan(ANALYZED, tiny_job(batch=12), mesh, strategies, 2)


def observed(*actions: Action) -> Plan:
    """Returns a plan of two stages on six ranks, with an observer, rank 6, beside them."""
    plan = pipelined()
    observer = Role("observer", range(6, 7), actions or (WATCH, WRITE))
    return replace(plan, program=Program((*plan.program.roles, observer)))


@pytest.mark.parametrize("pp", [2, 3])
def test_every_rank_plays_the_role_of_its_pp_rank(pp: int):
    plan = pipelined(pp)
    assert [role.name for role in plan.program.roles] == [f"pp{index}" for index in range(pp)]
    for rank in range(plan.mesh.world_size):
        index = plan.mesh.coordinate(rank)["pp"]
        assert plan.role_of(rank) == plan.stage_role(index) == plan.program.roles[index]
    assert sum(len(role.ranks) for role in plan.program.roles) == plan.mesh.world_size


def test_without_a_pipeline_all_ranks_play_one_role():
    plan = plan_of(ANALYZED, 3)
    assert [(role.name, role.ranks) for role in plan.program.roles] == [("pp0", range(3))]


def test_the_plan_of_a_rank_keeps_the_lists_of_all_roles():
    plan = pipelined()
    for rank in range(6):
        mine = plan.for_rank(rank)
        assert mine.program == plan.program
        assert mine.role is plan.stage_role(rank // 3), "nothing is built again for equal shares"


def test_the_peer_of_a_message_is_the_role_at_its_index():
    plan = pipelined()
    first, second = plan.program.roles
    (send, *_) = (action.transfer for action in first.actions if action.stream == "send")
    assert plan.peer_role(first, send) == second
    total = next(action.transfer for action in first.actions if action.kind == "TOKEN_COUNT")
    with pytest.raises(ValueError, match="has no peer: it is between all ranks of a group"):
        plan.peer_role(first, total)


def test_a_rank_that_plays_no_role_is_refused():
    text = "there is no rank 7 in pp 2 x dp_replicate 3: its roles have ranks 0 to 6"
    with pytest.raises(ValueError, match=text):
        observed().for_rank(7)


def test_a_rank_outside_of_the_mesh_has_the_list_of_its_role_and_no_parameters():
    mine = observed().for_rank(6)
    assert mine.actions == (WATCH, WRITE)
    assert mine.view.param_shardings == ()
    assert mine.view.model_spec.block_calls == ()
    assert mine.model_spec == pipelined().model_spec
    assert observed().for_rank(4).actions == pipelined().stage_role(1).actions


def test_a_role_outside_of_the_mesh_is_checked_and_simulated():
    assert not static_checks(observed())
    ends = {(each.role, each.action.name): each.end for each in simulate(observed().program)}
    assert ends["observer", "WATCH()"] == ends["pp1", "LOSS_SUM()"] + 1
    lost = observed(replace(WATCH, waits=("pp1/NOTHING()",)))
    assert [(each.location, each.problem) for each in static_checks(lost)[:2]] == [
        ("program.observer", "WATCH() waits for pp1/NOTHING(), which no rank runs"),
        ("program.observer", "WATCH() allocates loss history, and no action frees it"),
    ]
    with pytest.raises(SimulationDeadlock, match="observer: action 0 of 1"):
        simulate(lost.program)


def test_a_role_outside_of_the_mesh_takes_only_the_memory_of_its_actions():
    plan = observed()
    assert state_bytes(plan, 6).model_states == 0
    assert peak_nbytes_by_category(plan, 6) == {"buffers": 64}
    assert transient_nbytes(plan) == transient_nbytes(pipelined())
    assert fullest_rank(plan) == fullest_rank(pipelined())


def test_the_time_of_a_role_outside_of_the_mesh_is_predicted():
    on = ground(flops=1e9, moved=1e9, links=1e6, cores=8)
    alone, beside = predict_step(pipelined(), on), predict_step(observed(), on)
    assert list(beside.roles) == ["pp0", "pp1", "observer"]
    assert beside.step_s == pytest.approx(alone.step_s)
    watching = beside.roles["observer"]
    assert watching.seconds == pytest.approx(beside.step_s)
    assert watching.compute_s == 0.0, "the cost of a kind that is not known is not guessed"


def test_a_role_outside_of_the_mesh_survives_the_json_form():
    program = observed().program
    nameless = program.edit(lambda actions: [replace(action, tensors=()) for action in actions])
    assert program_from_dict(json.loads(json.dumps(program_to_dict(program)))) == nameless


def test_a_role_outside_of_the_mesh_is_reported(tmp_path: Path):
    plan = observed()
    plan = replace(plan, run=replace(plan.run, folder=str(tmp_path)))
    prediction = predict_step(plan, ground(flops=1e9, moved=1e9, links=1e6))
    overview = PlanOverview(plan, DataSummary("", 12), prediction, "")
    console = Console(width=140, record=True, file=StringIO())
    for view in (plan_details(plan), overview, prediction_view(plan, prediction)):
        console.print(view)
    assert "observer" in console.export_text()
    assert len(simulated_spans(plan)) == 2, "an observer runs no stage"
    write_run_info(
        plan,
        plan_summary(plan),
        state_nbytes_by_role(plan),
        torch.device("cpu"),
        prediction_dict(plan, prediction),
    )
    (tmp_path / "metrics.jsonl").write_text("")
    record = read_run_record(tmp_path)
    assert record.program is not None
    assert [role.ranks for role in record.program.roles] == [range(3), range(3, 6), range(6, 7)]
    assert any(bar.row == "observer compute" for bar in planned_bars(record))
    assert schedule_svg(record).count("pp rank") == 2
    assert "observer planned, at its peak" in run_page([record], "0")


def planned_bars(record: RunRecord):
    timeline = step_timeline(record)
    assert timeline is not None
    return timeline.planned
