"""The simulator of a program: list order within a stream, concurrent streams, waits between roles, and
deadlocks.
"""

import pytest

from meshwright.plan.step.program import Action
from meshwright.plan.step.simulator import SimulationDeadlock, simulate
from tests.paper_model import program_of


def compute(name: str, *waits: str) -> Action:
    return Action(name, waits=waits)


def wire(name: str, *waits: str) -> Action:
    return Action(name, stream="comm", waits=waits)


def times(
    roles: dict[str, list[Action]], durations: dict[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Start and end per `role/kind`; an action lasts 1 unless `durations` says otherwise."""
    given = durations or {}
    ticks = simulate(program_of(roles), lambda action: given.get(action.kind, 1.0))
    return {
        f"{simulated.role}/{simulated.action.kind}": (simulated.start, simulated.end) for simulated in ticks
    }


def stuck(roles: dict[str, list[Action]]) -> list[str]:
    with pytest.raises(SimulationDeadlock) as caught:
        simulate(program_of(roles))
    return str(caught.value).splitlines()


def test_a_stream_runs_its_actions_in_list_order():
    assert times({"r": [compute("A"), compute("B"), compute("C")]}) == {
        "r/A": (0, 1),
        "r/B": (1, 2),
        "r/C": (2, 3),
    }


def test_the_timeline_is_in_order_of_start():
    ticks = simulate(program_of({"r": [compute("A"), wire("W"), compute("B")], "s": [compute("C")]}))
    assert [simulated.start for simulated in ticks] == sorted(simulated.start for simulated in ticks)
    assert len(ticks) == 4


def test_communication_runs_beside_compute():
    seen = times({"r": [compute("A"), wire("W"), compute("B"), compute("C", "W()")]}, {"W": 5})
    assert seen == {"r/A": (0, 1), "r/W": (1, 6), "r/B": (1, 2), "r/C": (6, 7)}


def test_a_comm_action_starts_after_the_compute_action_listed_before_it():
    assert times({"r": [compute("A"), wire("W")]}, {"A": 3})["r/W"] == (3, 4)


def test_a_compute_action_listed_later_does_not_delay_the_comm_stream():
    assert times({"r": [wire("V"), wire("W"), compute("A")]}, {"A": 9})["r/W"] == (1, 2)


def test_comm_actions_of_one_role_run_one_after_another():
    assert times({"r": [wire("V"), wire("W")]}, {"V": 4})["r/W"] == (4, 5)


def test_an_action_waits_for_another_role():
    seen = times({"s": [compute("B", "r/A()")], "r": [compute("A")]}, {"A": 3})
    assert seen == {"r/A": (0, 3), "s/B": (3, 4)}


def test_a_slash_in_a_subject_is_no_role():
    program = program_of({"r": [Action("F", "a/b"), Action("B", "a/b", waits=("F(a/b)",))]})
    assert [simulated.end for simulated in simulate(program)] == [1, 2]


def test_a_main_thread_is_not_blocked_by_a_message_in_flight():
    """Each posts its receive first and sends what it computes meanwhile: nobody is stuck."""
    seen = times(
        {
            "r": [wire("RECV", "s/F()"), compute("F"), compute("G", "RECV()")],
            "s": [wire("RECV", "r/F()"), compute("F"), compute("G", "RECV()")],
        }
    )
    for role in "rs":
        assert [seen[f"{role}/{kind}"] for kind in ("F", "RECV", "G")] == [(0, 1), (1, 2), (2, 3)]


def test_a_pipeline_of_three_roles_is_simulated():
    roles = {
        f"pp{i}": [Action("F", str(m), waits=(f"pp{i - 1}/F({m})",) if i else ()) for m in range(2)]
        for i in range(3)
    }
    ends = {
        (simulated.role, simulated.action.subject): simulated.end for simulated in simulate(program_of(roles))
    }
    assert ends["pp2", "0"] == 3
    assert ends["pp2", "1"] == 4


def test_a_cycle_is_shown_with_an_arrow_at_every_role():
    lines = stuck(
        {"r": [compute("X"), compute("A", "s/B()")], "s": [compute("B", "r/A()")], "t": [compute("C")]}
    )
    assert lines == [
        "no role can proceed:",
        "  r: action 1 of 2, A()  <-- waits for s/B()",
        "  s: action 0 of 1, B()  <-- waits for r/A()",
        "  t: finished",
    ]


def test_only_what_is_missing_is_named():
    lines = stuck({"r": [compute("A"), compute("B"), compute("C", "A()", "NONE()", "B()")]})
    assert lines[1] == "  r: action 2 of 3, C()  <-- waits for NONE()"


def test_the_comm_stream_and_the_main_thread_are_both_shown():
    lines = stuck({"r": [wire("W", "s/NONE()"), compute("A", "W()")], "s": []})
    assert lines[1:3] == [
        "  r: action 0 of 2, W()  <-- waits for s/NONE()",
        "  r: action 1 of 2, A()  <-- waits for W()",
    ]


@pytest.mark.parametrize("first", [compute("A", "B()"), wire("A", "B()")])
def test_an_action_that_waits_for_a_later_one_of_its_own_list_is_stuck(first: Action):
    assert stuck({"r": [first, compute("B")]})[1] == "  r: action 0 of 2, A()  <-- waits for B()"


@pytest.mark.parametrize(("host_seconds", "end"), [(3, 7), (9, 11)])
def test_what_the_next_step_waits_for_runs_beside_it(host_seconds: float, end: float):
    """In the timeline of a step the STEP of the step before comes first, on the stream of the host."""
    actions = [
        compute("F"),
        Action("FETCH_PARAM", stream="copy_in", previous_waits=("STEP()",)),
        compute("CLIP", "FETCH_PARAM()"),
        Action("STEP", stream="host", waits=("CLIP()",)),
    ]
    assert times({"r": actions}, {"F": 5, "STEP": host_seconds}) == {
        "r/F": (0, 5),
        "r/STEP": (0, host_seconds),
        "r/FETCH_PARAM": (end - 2, end - 1),
        "r/CLIP": (end - 1, end),
    }
