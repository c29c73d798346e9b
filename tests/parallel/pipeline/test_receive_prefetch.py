"""Receives move one run ahead, unless they depend on that run."""

from meshwright.parallel.pipeline.receive_prefetch import ReceiveWindow, RunsNeeded, post_receives_early
from meshwright.parallel.pipeline.schedules.gpipe import gpipe_schedule
from meshwright.parallel.pipeline.schedules.one_f_one_b import one_f_one_b_schedule
from meshwright.plan.step.program import Action

STARTS = {("F", "a"), ("B", "a")}


def run(kind: str, microbatch: int) -> Action:
    return Action(kind, "a", microbatch)


def receive(name: str, microbatch: int, kind: str = "RECV") -> Action:
    return Action(kind, name, microbatch, "recv")


def names(actions: list[Action], windows: dict[str, tuple[int, int]]) -> list[str]:
    anywhere = dict.fromkeys((action.name for action in actions), ReceiveWindow(0, 99))
    chosen = anywhere | {name: ReceiveWindow(*window) for name, window in windows.items()}
    return [action.name for action in post_receives_early(actions, STARTS, chosen)]


def test_runs_needed_by_hand():
    # rank 0: F0 F1 B0 B1    rank 1: F0 F1 B1 B0, as gpipe has it
    needed = RunsNeeded(gpipe_schedule(2, 2))
    assert needed.needed_by(("F", 0, 1)).tolist() == [2, 0]
    assert needed.needed_by(("F", 1, 0)).tolist() == [1, 1]
    assert (
        needed.needed_by(("I", 1, 0))[0] == 2
    )  # the last rank begins backwards when it has all microbatches
    needed = RunsNeeded(one_f_one_b_schedule(2, 2))
    assert needed.needed_by(("I", 1, 0)).tolist() == [1, 2]


def test_windows_by_hand():
    # 1f1b on two ranks    rank 0: F0 F1 B0 B1    rank 1: F0 B0 F1 B1
    needed = RunsNeeded(one_f_one_b_schedule(2, 2))
    # x 1 is sent behind F1 of rank 0, its second run; only B1 of rank 1 needs the same, and none needs more
    assert needed.window(("F", 0, 1), 1, is_forwarded=False) == (0, 4)
    # x 0 is sent behind the first run; the third run of rank 1 needs the second one of rank 0
    assert needed.window(("F", 0, 0), 1, is_forwarded=False) == (0, 2)
    # dx 0 needs F0 of rank 0
    assert needed.window(("I", 1, 0), 0, is_forwarded=False).first == 1


def test_a_receive_stands_before_the_run_before_its_own():
    listed = [run("F", 0), receive("x", 1), run("F", 1), receive("x", 2), run("F", 2)]
    assert names(listed, {}) == ["RECV(x, 1)", "F(a, 0)", "RECV(x, 2)", "F(a, 1)", "F(a, 2)"]


def test_a_receive_that_depends_on_that_run_stays_and_so_do_those_behind_it():
    listed = [run("F", 0), receive("x", 1), receive("y", 1), run("F", 1), receive("x", 2), run("F", 2)]
    assert names(listed, {"RECV(x, 1)": (1, 99)}) == [
        *("F(a, 0)", "RECV(x, 1)", "RECV(y, 1)"),
        *("RECV(x, 2)", "F(a, 1)", "F(a, 2)"),
    ]


def test_a_receive_is_posted_before_its_sender_would_need_more():
    listed = [run("F", 0), run("F", 1), run("F", 2), run("F", 3), receive("skip", 0), run("F", 4)]
    assert names(listed, {"RECV(skip, 0)": (0, 1)})[:3] == ["F(a, 0)", "RECV(skip, 0)", "F(a, 1)"]


def test_what_waits_for_a_receive_does_not_stand_before_another_one():
    passed_on = Action("SEND", "x", 1, "send", waits=("RECV(x, 1)",))
    listed = [run("F", 0), receive("x", 1), passed_on, run("F", 1), receive("skip", 0), run("F", 2)]
    assert names(listed, {"RECV(x, 1)": (1, 1), "RECV(skip, 0)": (0, 1)}) == [
        *("F(a, 0)", "RECV(x, 1)", "RECV(skip, 0)", "SEND(x, 1)"),
        *("F(a, 1)", "F(a, 2)"),
    ]


def test_gradients_that_the_run_adds_up_are_received_behind_it():
    listed = [run("F", 0), run("B", 0), receive("dx", 0, "RECV_GRAD"), run("B", 1)]
    assert names(listed, {})[1:3] == ["B(a, 0)", "RECV_GRAD(dx, 0)"]
