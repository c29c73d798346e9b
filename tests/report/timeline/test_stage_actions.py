"""Schedule actions: a program becomes the schedule it was made from; a traced step has the measured times."""

import pytest

from meshwright.api import make_plan
from meshwright.parallel.memory.activation_checkpointing import ActivationCheckpointing
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Allocation, Program, Role
from meshwright.plan.step.simulator import TimelineSpan
from meshwright.report.timeline.pipeline_stages import stage_block_calls
from meshwright.report.timeline.stage_actions import (
    TimedAction,
    gantt_rows,
    max_in_flight,
    simulated_actions,
    traced_actions,
)
from tests.tiny_model import analyzed_model, tiny_job

PARTS = [["a"], ["b"]]


def planned(schedule: str, ranks: int = 2, chunks: int = 0, *others: object) -> Plan:
    return make_plan(
        analyzed_model(),
        tiny_job(batch=4),
        Mesh(pp=ranks),
        (Pipeline(schedule=schedule, virtual_stages=chunks), *others),
        1,
    )


def labels(plan: Plan) -> list[str]:
    found = gantt_rows(simulated_actions(plan.program, {}), plan.program, stage_block_calls(plan))
    return [" ".join(span.label for span in row if span.kind != "~") for row in found]


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("gpipe", 0, ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2 B3"]),
        ("1f1b", 0, ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (
            "interleaved",
            2,
            [
                "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3",
                "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3",
            ],
        ),
    ],
)
def test_a_program_is_drawn_as_the_schedule_that_it_was_made_from(
    schedule: str, chunks: int, expected: list[str]
):
    assert labels(planned(schedule, 2, chunks)) == expected


def test_recomputation_belongs_to_the_backward_after_it():
    assert labels(planned("1f1b", 2, 0, ActivationCheckpointing())) == labels(planned("1f1b"))


def test_no_more_micro_batches_are_in_flight_than_the_schedule_keeps():
    for schedule, expected in (
        ("gpipe", [4, 4, 4]),
        ("1f1b", [3, 2, 1]),
        ("naive_model_parallel", [1, 1, 1]),
    ):
        plan = planned(schedule, 3)
        pairs = zip(plan.program.roles, stage_block_calls(plan), strict=True)
        assert [max_in_flight(role.actions, part) for role, part in pairs] == expected


def chain() -> Program:
    """One microbatch through two stages, of two ranks each, and back."""
    there = Action("SEND", "x", 0, "send", ("F(a, 0)",))
    came = Action("RECV", "x", 0, "recv", ("pp0/SEND(x, 0)",), allocations=(Allocation("RECV(x, 0)", 8),))
    forward = Action(
        "F",
        "b",
        0,
        waits=(came.name,),
        allocations=(Allocation("output(b, 0)", 4), Allocation("gradient(b)", 100)),
    )
    back = Action("B", "b", 0, waits=(forward.name,), frees=("RECV(x, 0)", "output(b, 0)"))
    first = Role("pp0", range(2), (Action("F", "a", 0), there))
    return Program((first, Role("pp1", range(2, 4), (came, forward, back))))


def test_a_rank_that_waits_for_what_is_on_its_way_is_told_from_one_for_which_nothing_was_sent():
    lengths = {"F(a, 0)": 3.0, "SEND(x, 0)": 2.0, "F(b, 0)": 1.0, "B(b, 0)": 2.0}
    found = gantt_rows(simulated_actions(chain(), lengths), chain(), PARTS)
    assert found[0] == [TimelineSpan("F", 0.0, 3.0)]
    assert found[1] == [
        TimelineSpan("~", 3.0, 5.0),
        TimelineSpan("F", 5.0, 6.0, memory=12.0, memory_after=12.0),
        TimelineSpan("B", 6.0, 8.0, memory=12.0, memory_after=0.0),
    ]


def event(name: str, kind: str, begin: float, length: float, step: int = 7) -> dict:
    said = {"step": step, **({} if kind == "glue" else {"action": name})}
    return {"name": name, "cat": kind, "ts": begin * 1e3, "dur": length * 1e3, "args": said}


def test_a_traced_step_is_that_of_the_first_rank_of_each_role_with_the_glue_of_its_forwards():
    traces = {
        0: [
            event("F(a, 0)", "F", 11, 2),
            event("forward(0)", "glue", 10, 4),
            event("SEND(x, 0)", "SEND", 14, 9),
        ],
        1: [event("F(a, 0)", "F", 99, 1)],
        2: [event("F(b, 0)", "F", 15, 1), event("B(b, 0)", "B", 17, 2), event("B(b, 0)", "B", 3, 1, step=6)],
    }
    acts = traced_actions(chain(), traces, 7)
    assert acts["pp0"][0] == TimedAction(Action("F", "a", 0), 10.0, 14.0)
    found = gantt_rows(acts, chain(), PARTS)
    assert [(span.kind, span.begin, span.end) for span in found[0]] == [("F", 0.0, 4.0)]
    assert [(span.kind, span.begin, span.end) for span in found[1]] == [
        ("~", 4.0, 5.0),
        ("F", 5.0, 6.0),
        ("B", 7.0, 9.0),
    ]


def test_halves_of_a_backward_are_separate_actions():
    assert labels(planned("zb_h1"))[1].startswith("F0 I0")
