"""Receives move one run ahead, unless they depend on that run."""

from meshwright.parallel.pipeline.receive_prefetch import find_runs_needed, post_receives_early
from meshwright.parallel.pipeline.schedules.gpipe import gpipe_schedule
from meshwright.parallel.pipeline.schedules.one_f_one_b import one_f_one_b_schedule
from meshwright.plan.step.program import Action

STARTS = {("F", "a"), ("B", "a")}


def run(kind: str, microbatch: int) -> Action:
    return Action(kind, "a", microbatch)


def receive(name: str, microbatch: int, kind: str = "RECV") -> Action:
    return Action(kind, name, microbatch, "recv")


def names(actions: list[Action], needed: dict[str, int]) -> list[str]:
    runs_needed = dict.fromkeys((action.name for action in actions), 0) | needed
    return [action.name for action in post_receives_early(actions, STARTS, runs_needed)]


def test_runs_needed_by_hand():
    # rank 0: F0 F1 B0 B1    rank 1: F0 F1 B1 B0, as gpipe has it
    needed = find_runs_needed(gpipe_schedule(2, 2))
    assert needed["F", 0, 1].tolist() == [2, 0]
    assert needed["F", 1, 0].tolist() == [1, 1]
    assert needed["I", 1, 0][0] == 2  # the last rank begins its backwards when it has all microbatches
    needed = find_runs_needed(one_f_one_b_schedule(2, 2))
    assert needed["I", 1, 0].tolist() == [1, 2]


def test_a_receive_stands_before_the_run_before_its_own():
    listed = [run("F", 0), receive("x", 1), run("F", 1), receive("x", 2), run("F", 2)]
    assert names(listed, {}) == ["RECV(x, 1)", "F(a, 0)", "RECV(x, 2)", "F(a, 1)", "F(a, 2)"]


def test_a_receive_that_depends_on_that_run_stays_and_so_do_those_behind_it():
    listed = [run("F", 0), receive("x", 1), receive("y", 1), run("F", 1), receive("x", 2), run("F", 2)]
    assert names(listed, {"RECV(x, 1)": 1}) == [
        *("F(a, 0)", "RECV(x, 1)", "RECV(y, 1)"),
        *("RECV(x, 2)", "F(a, 1)", "F(a, 2)"),
    ]


def test_gradients_that_the_run_adds_up_are_received_behind_it():
    listed = [run("F", 0), run("B", 0), receive("dx", 0, "RECV_GRAD"), run("B", 1)]
    assert names(listed, {})[1:3] == ["B(a, 0)", "RECV_GRAD(dx, 0)"]
