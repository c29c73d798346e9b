"""Messages between ranks match where a send ends only when its receive has begun."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer, with_waits
from meshwright.verifier.pipeline_message_order import find_unbuffered_deadlocks
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import program_of
from tests.tiny_model import analyzed_model, tiny_job


def message(kind: str, subject: str, peer: int, *waits: str) -> Action:
    lane = "send" if kind == "SEND" else "recv"
    return Action(kind, subject, stream=lane, waits=waits, transfer=Transfer(lane, ("pp",), 8, peer=peer))


def test_two_ranks_that_wait_for_their_sends_before_they_receive_are_noticed():
    def listed(mine: str, theirs: str, peer: int) -> list[Action]:
        receive = message("RECV", theirs, peer, f"pp{peer}/SEND({theirs})")
        return [
            message("SEND", mine, peer),
            Action("F", waits=(f"SEND({mine})",)),
            receive,
            Action("B", waits=(receive.name,)),
        ]

    stuck = program_of({"pp0": listed("x", "y", 1), "pp1": listed("y", "x", 0)})
    assert [fault.split(",")[0] for fault in find_unbuffered_deadlocks(stuck)] == [
        "pp0 stops at F() and waits forever for pp0/SEND(x)",
        "pp1 stops at F() and waits forever for pp1/SEND(y)",
    ]
    free = stuck.edit(
        lambda actions: [replace(action, waits=()) if action.kind == "F" else action for action in actions]
    )
    assert list(find_unbuffered_deadlocks(free)) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_meet_in_every_schedule(schedule: str):
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(schedule=schedule),), 1)
    assert list(find_unbuffered_deadlocks(plan.program)) == []


def test_a_forward_that_waits_for_what_it_has_sent_is_noticed():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(schedule="gpipe"),), 1)

    def waiting(actions: list[Action]) -> list[Action]:
        sent = [action.name for action in actions if action.kind == "SEND_GRAD"]
        return [
            with_waits(action, sent[-1:]) if action.kind == "B" and action.microbatch == 0 else action
            for action in actions
        ]

    corrupted = replace(plan, program=plan.program.edit(waiting))
    assert any("whose other side does not begin" in fault.problem for fault in static_checks(corrupted))
