"""Predicted step time from the times of actions: against pipelines computed by hand, with every second
attributed.
"""

import pytest

import meshwright as mw
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Program, Transfer
from meshwright.planner.program_cost.action_cost import ActionCost
from meshwright.planner.program_cost.core_contention import SharedCores
from meshwright.planner.program_cost.prediction import (
    StepBreakdown,
    StepPrediction,
    predict_step,
    step_breakdown,
    with_collective_waits,
)
from tests.paper_model import program_of
from tests.parallel.tensor.odd_llama import analyzed_llama, planned
from tests.planner.simple_machine import ground
from tests.tiny_model import analyzed_model, tiny_job

MOVE = Transfer("send", ("pp",), 8, peer=1)


def compute(kind: str, subject: str, micro: int, *waits: str) -> Action:
    return Action(kind, subject, micro, waits=waits)


def two_stages(micros: int) -> Program:
    """Forwards of all microbatches, then their backwards, over two ranks."""
    first = [compute("F", "a", at) for at in range(micros)]
    sends = [Action("SEND", "x", at, "send", (f"F(a, {at})",), transfer=MOVE) for at in range(micros)]
    back = [compute("B", "a", at, f"pp1/B(b, {at})") for at in range(micros)]
    there = [compute("F", "b", at, f"pp0/SEND(x, {at})") for at in range(micros)]
    last = [compute("B", "b", at) for at in range(micros)]
    return program_of(
        {
            "pp0": [each for pair in zip(first, sends, strict=True) for each in pair] + back,
            "pp1": there + last,
        }
    )


def costs(program: Program, seconds: dict[str, ActionCost]) -> dict[int, ActionCost]:
    return {
        id(action): seconds.get(action.kind, ActionCost())
        for role in program.roles
        for action in role.actions
    }


def test_two_stages_take_the_time_computed_by_hand():
    program = two_stages(3)
    #   pp0   F F F . . . . B B B        one second each, two of a backward; nothing for messages
    # pp1   . F F F B B B . .          the last backward comes home after 1 + 3 + 3 x 2 seconds, and takes 2
    # more
    end, roles = step_breakdown(program, costs(program, {"F": ActionCost(1.0), "B": ActionCost(2.0)}))
    assert end == 1 + 3 + 3 * 2 + 2
    assert roles["pp0"] == StepBreakdown(compute_s=9.0, idle_s=3.0)
    assert roles["pp1"] == StepBreakdown(compute_s=9.0, idle_s=3.0)


def test_a_message_that_is_waited_for_is_told_apart_from_the_rank_that_sends_it():
    program = two_stages(1)
    end, roles = step_breakdown(
        program, costs(program, {"F": ActionCost(1.0), "B": ActionCost(2.0), "SEND": ActionCost(0.0, 0.5)})
    )
    assert end == 1 + 0.5 + 1 + 2 + 2
    assert roles["pp1"] == StepBreakdown(compute_s=3.0, exposed_comm_s=0.5, idle_s=3.0)


def test_what_is_sent_within_a_block_and_what_the_optimizer_takes_have_places_of_their_own():
    program = program_of({"pp0": [compute("F", "a", 0), Action("STEP")]})
    end, roles = step_breakdown(
        program, costs(program, {"F": ActionCost(1.0, 0.25), "STEP": ActionCost(0.5)})
    )
    assert (end, roles["pp0"]) == (1.75, StepBreakdown(compute_s=1.0, inner_comm_s=0.25, optimizer_s=0.5))


def test_what_all_roles_sum_starts_when_the_last_of_them_has_come():
    sums = {"transfer": Transfer("all_reduce", ("pp",), 8), "stream": "comm"}
    lists = {
        role: [
            compute(kind, "a", 0),
            Action("GLOBAL_NORM", waits=(f"{kind}(a, 0)",), **sums),
            Action("STEP", waits=("GLOBAL_NORM()",)),
        ]
        for role, kind in (("pp0", "F"), ("pp1", "B"))
    }
    program = with_collective_waits(program_of(lists), Mesh(pp=2))
    end, roles = step_breakdown(
        program,
        costs(
            program,
            {
                "F": ActionCost(1.0),
                "B": ActionCost(5.0),
                "STEP": ActionCost(1.0),
                "GLOBAL_NORM": ActionCost(0.0, 0.5),
            },
        ),
    )
    assert end == 5 + 0.5 + 1
    assert roles["pp0"] == StepBreakdown(compute_s=1.0, exposed_comm_s=0.5, idle_s=4.0, optimizer_s=1.0)


def test_roles_that_meet_against_their_order_are_left_as_they_are():
    move = {"transfer": Transfer("all_reduce", ("pp",), 8), "stream": "comm"}
    first = [Action("SUM", "x", waits=(), **move), compute("F", "a", 0, "SUM(x)")]
    other = [compute("F", "b", 0, "pp0/F(a, 0)"), Action("SUM", "x", waits=("F(b, 0)",), **move)]
    program = program_of({"pp0": first, "pp1": other})
    assert with_collective_waits(program, Mesh(pp=2)) is program


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(pp=2), Mesh(dp_shard=3), Mesh(tp=2), Mesh(cp=2)], ids=str)
def test_every_second_of_every_role_has_its_place(mesh: Mesh):
    plan = planned(analyzed_llama(), mesh, micro=2 if mesh.pp > 1 else 0, samples=6)[1]
    on = ground(flops=1e9, moved=1e9, links=1e8, call_s=1e-5, cores=2)
    found = predict_step(plan, on)
    assert found.step_s > 0
    assert list(found.as_dict()["roles"]) == [role.name for role in plan.program.roles]
    for each in found.roles.values():
        assert each.seconds == pytest.approx(found.step_s)


def test_a_plan_on_one_device_takes_the_sum_of_its_actions_and_faster_links_change_nothing():
    plan = planned(analyzed_llama(), Mesh(), samples=6)[1]
    found = predict_step(plan, ground(flops=1e9))
    assert found.roles["pp0"] == StepBreakdown(compute_s=pytest.approx(found.step_s))
    assert predict_step(plan, ground(flops=2e9)).step_s == pytest.approx(found.step_s / 2)
    assert predict_step(plan, ground(flops=1e9, links=1.0)).step_s == found.step_s


def test_ranks_that_share_cores_wait_for_each_other():
    plan = planned(analyzed_llama(), Mesh(dp_replicate=4), samples=8)[1]
    alone, crowded = (predict_step(plan, ground(flops=1e9, cores=cores)).step_s for cores in (4, 2))
    assert crowded == pytest.approx(2 * alone)


def test_a_pipeline_whose_ranks_alternate_needs_one_core():
    program = two_stages(1)
    seconds = costs(program, {"F": ActionCost(1.0), "B": ActionCost(2.0)})
    assert step_breakdown(program, seconds, SharedCores(1, {"pp0": 1, "pp1": 1}))[0] == pytest.approx(
        step_breakdown(program, seconds)[0]
    )


def test_a_step_of_rounds_is_the_mean_of_its_two_kinds():
    analyzed, on = analyzed_model(), ground(flops=1e9, links=1e6)

    def found(mesh: Mesh, *strategies: mw.Strategy) -> StepPrediction:
        return predict_step(mw.make_plan(analyzed, tiny_job(), mesh, strategies), on)

    rounds = found(Mesh(outer=2), mw.LocalSGD(sync_every=4))
    assert rounds.round_end_s is not None
    between_s = (4 * rounds.step_s - rounds.round_end_s) / 3
    assert 0 < between_s < rounds.step_s < rounds.round_end_s
    assert all(each.seconds == pytest.approx(rounds.step_s) for each in rounds.roles.values())
    every_step = found(Mesh(outer=2), mw.LocalSGD(sync_every=1))
    assert every_step.step_s == pytest.approx(rounds.round_end_s)
    assert "round_end_s" in rounds.as_dict()
    prompt = found(Mesh(outer=2), mw.StreamingDiLoCo(sync_every=4, fragments=2))
    hidden = [
        found(Mesh(outer=2), mw.StreamingDiLoCo(sync_every=4, fragments=2, delay=delay)) for delay in (1, 3)
    ]
    assert between_s < hidden[1].step_s < hidden[0].step_s < prompt.step_s
    assert "round_end_s" not in found(Mesh(dp_replicate=2), mw.BatchSplit(), mw.DDP()).as_dict()
