"""Core contention: actions last longer while more threads run than there are cores."""

import pytest

from meshwright.plan.step.program import Action, Program
from meshwright.planner.program_cost.core_contention import SharedCores, simulate_shared
from tests.paper_model import program_of


def compute(name: str, *waits: str) -> Action:
    return Action(name, waits=waits)


def ends(
    program: Program, shared: SharedCores | None, seconds: dict[str, float] | None = None
) -> dict[str, float]:
    lasting = seconds or {}
    ticks = simulate_shared(program, lambda action: lasting.get(action.kind, 1.0), shared)
    return {f"{tick.role}/{tick.action.kind}": tick.end for tick in ticks}


def test_three_ranks_on_two_cores_take_half_as_long_again():
    program = program_of({role: [compute("A"), compute("B")] for role in "xyz"})
    assert ends(program, SharedCores(2, dict.fromkeys("xyz", 1)))["z/B"] == pytest.approx(3.0)
    assert ends(program, SharedCores(3, dict.fromkeys("xyz", 1)))["z/B"] == ends(program, None)["z/B"] == 2.0


def test_all_ranks_of_a_role_want_a_core_and_each_of_its_threads_one():
    program = program_of({"x": [compute("A")]})
    assert ends(program, SharedCores(2, {"x": 6}))["x/A"] == pytest.approx(3.0)
    assert ends(program, SharedCores(2, {"x": 2}, threads_per_rank=3))["x/A"] == pytest.approx(3.0)


def test_who_is_alone_for_a_while_is_as_fast_as_ever_meanwhile():
    program = program_of({"x": [compute("A")], "y": [compute("B"), compute("C")]})
    found = ends(program, SharedCores(1, {"x": 1, "y": 1}))
    assert found["y/C"] == pytest.approx(3.0, rel=0.02)  # three seconds of work, one core


def test_what_is_sent_takes_a_core_from_who_computes_beside_it():
    wire = Action("W", stream="comm")
    program = program_of({"x": [wire, compute("A")]})
    assert ends(program, None)["x/A"] == 1.0
    assert ends(program, SharedCores(2, {"x": 2}))["x/A"] == pytest.approx(2.0)


def test_messages_alone_are_as_they_were_measured_with_all_that_take_part():
    program = program_of({"x": [Action("W", stream="comm")]})
    assert ends(program, SharedCores(2, {"x": 4}))["x/W"] == 1.0


def test_where_acts_last_longer_messages_start_as_much_later():
    program = program_of({"x": [compute("A"), Action("W", stream="comm", waits=("A()",))]})
    for cores, times in ((6, 1.0), (2, 3.0)):
        ticks = simulate_shared(
            program,
            lambda action: float(action.kind == "A"),
            SharedCores(cores, {"x": 6}),
            lambda action: 0.1,
        )
        assert ticks[-1].start == pytest.approx(1.1 * times, rel=0.01)
