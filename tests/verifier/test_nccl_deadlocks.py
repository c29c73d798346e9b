"""What NCCL may make a rank wait for does not stop a program, and programs that it would stop are noticed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from meshwright.api import analyze, make_plan
from meshwright.engine.forward_backward.pipelined_eval_order import EvalOrder, evaluation_program
from meshwright.model.analysis.analyze import AnalyzedModel
from meshwright.parallel.pipeline import send_recv_insertion
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.parallel.pipeline.receive_prefetch import ReceiveWindow
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.plan.job.errors import Diagnostic, PlanError
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer, with_waits
from meshwright.verifier.nccl_deadlocks import (
    NcclRule,
    check_evaluation,
    check_launch_blocking,
    find_nccl_deadlocks,
)
from meshwright.verifier.static_checks import static_checks
from tests.paper_model import program_of
from tests.tiny_model import Layer, Tiny, tiny_job, token_samples


class Deep(Tiny):
    """Ten blocks, so that four ranks have two stages each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(Layer(0.0) for _ in range(5))


@cache
def deep_model() -> AnalyzedModel:
    return analyze(Deep, {key: value[:2] for key, value in token_samples().items()})


def pipelined(schedule: str, pp: int = 2, microbatches: int = 6, virtual_stages: int = 0) -> Plan:
    pipeline = Pipeline(schedule=schedule, virtual_stages=virtual_stages)
    return make_plan(deep_model(), tiny_job(batch=microbatches), Mesh(pp=pp), (pipeline,), 1)


def with_actions(actions: dict[str, list[Action]]) -> Plan:
    plan = pipelined("1f1b", pp=len(actions))
    return replace(plan, program=program_of(actions))


def deadlocks(plan: Plan, rule: NcclRule) -> Iterator[str]:
    return find_nccl_deadlocks(plan.program, plan.mesh, rule)


def launch_blocking(plan: Plan, variables: dict[str, str]) -> Iterator[Diagnostic]:
    name = "CUDA_LAUNCH_BLOCKING"
    return check_launch_blocking(plan.program, plan.mesh, name, variables.get(name, ""))


def message(kind: str, subject: str, peer: int, *waits: str) -> Action:
    stream = "send" if kind == "SEND" else "recv"
    return Action(kind, subject, stream=stream, waits=waits, transfer=Transfer(stream, ("pp",), 8, peer=peer))


def received(subject: str, peer: int) -> Action:
    return message("RECV", subject, peer, f"pp{peer}/SEND({subject})")


def test_two_ranks_that_wait_for_their_sends_before_they_receive_are_noticed():
    def listed(mine: str, theirs: str, peer: int) -> list[Action]:
        return [
            message("SEND", mine, peer),
            Action("F", waits=(f"SEND({mine})",)),
            received(theirs, peer),
            Action("B", waits=(f"RECV({theirs})",)),
        ]

    stuck = with_actions({"pp0": listed("x", "y", 1), "pp1": listed("y", "x", 0)})
    assert list(deadlocks(stuck, "meet")) == [
        "pp0 stops at F() and waits forever for pp1 to begin its side of SEND(x)",
        "pp1 stops at F() and waits forever for pp0 to begin its side of SEND(y)",
    ]
    free = stuck.program.edit(
        lambda actions: [replace(action, waits=()) if action.kind == "F" else action for action in actions]
    )
    assert list(deadlocks(replace(stuck, program=free), "meet")) == []


def test_a_receive_of_what_depends_on_the_next_computation_is_noticed():
    ahead = with_actions(
        {
            "pp0": [
                received("dx", 1),
                Action("F"),
                message("SEND", "x", 1, "F()"),
                Action("B", waits=("RECV(dx)",)),
            ],
            "pp1": [
                received("x", 0),
                Action("B", waits=("RECV(x)",)),
                message("SEND", "dx", 0, "B()"),
            ],
        }
    )
    assert list(deadlocks(ahead, "meet")) == []
    assert list(deadlocks(ahead, "synchronize")) == [
        "pp0 begins RECV(dx) before F(), on which it depends: whoever waits for the device in between waits "
        "forever"
    ]
    assert len(list(deadlocks(ahead, "first_use"))) == 2


def test_collectives_of_stages_in_another_order_are_noticed():
    def listed(*groups: tuple[int, int]) -> list[Action]:
        transfers = [Transfer("all_reduce", ("pp",), 8, member_indices=group) for group in groups]
        sums = [Action(f"SUM{at.member_indices}", stream="comm", transfer=at) for at in transfers]
        return [each for one in sums for each in (one, Action(f"READ{one.kind}", waits=(one.name,)))]

    lists = {"pp0": listed((0, 1), (0, 2)), "pp1": listed((1, 2), (0, 1)), "pp2": listed((0, 2), (1, 2))}
    assert len(list(deadlocks(with_actions(lists), "meet"))) == 3
    lists |= {"pp1": listed((0, 1), (1, 2))}
    assert list(deadlocks(with_actions(lists), "meet")) == []


# a communicator that is connected at its first message stops both its ranks
NEEDS_CONNECTED_PAIRS = {("dualpipe", 4)}


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_waits_for_ever(schedule: str, pp: int):
    made = 0
    for microbatches in (1, 2, 3, 6):
        try:
            plan = pipelined(schedule, pp, microbatches)
        except PlanError:  # this schedule needs more microbatches, or another number of ranks
            continue
        made += 1
        rules: tuple[NcclRule, ...] = ("synchronize", "first_use")
        for rule in rules[: 1 if (schedule, pp) in NEEDS_CONNECTED_PAIRS else 2]:
            assert list(deadlocks(plan, rule)) == [], rule
            for num_forwards in (1, 2, 5):
                evaluation = replace(
                    plan, program=evaluation_program(plan.program, plan.sharding, num_forwards)
                )
                assert list(deadlocks(evaluation, rule)) == [], (rule, num_forwards)
    assert made or (schedule, pp) == ("dualpipe", 3)  # which needs an even number of ranks


def test_launches_that_block_are_safe_in_naive_model_parallel_and_refused_in_1f1b():
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    assert list(launch_blocking(pipelined("naive_model_parallel"), blocking)) == []
    (refusal,) = launch_blocking(pipelined("1f1b"), blocking)
    assert "every message blocks its rank" in refusal.problem
    assert "pp0 stops at" in refusal.problem
    assert list(launch_blocking(pipelined("1f1b"), {"CUDA_LAUNCH_BLOCKING": "0"})) == []
    assert list(launch_blocking(pipelined("1f1b"), {})) == []


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_v", "dualpipev"])
def test_receives_that_ignore_what_they_depend_on_are_noticed(schedule: str, monkeypatch):
    monkeypatch.setattr(send_recv_insertion.TransferRoutes, "receive_windows", lambda *_: _Anywhere())
    plan = pipelined(schedule, pp=3, microbatches=2)
    assert any("on which it depends" in each.problem for each in static_checks(plan))


class _Anywhere(dict[str, ReceiveWindow]):
    def __missing__(self, name: str) -> ReceiveWindow:
        return ReceiveWindow(0, 99)


def test_evaluations_that_post_every_receive_ahead_are_noticed(monkeypatch):
    monkeypatch.setattr(EvalOrder, "_send_time", lambda *_: 0)
    plan = pipelined("zb_v")
    texts = list(check_evaluation(plan.program, plan.sharding))
    assert texts
    assert all(text.startswith("in an evaluation of ") for text in texts)


def test_a_forward_that_waits_for_what_it_has_sent_is_noticed():
    plan = pipelined("gpipe")

    def waiting(actions: list[Action]) -> Iterator[Action]:
        sent = [action.name for action in actions if action.kind == "SEND_GRAD"]
        for action in actions:
            is_first = action.kind == "B" and action.microbatch == 0
            yield with_waits(action, sent[-1:]) if is_first else action

    corrupted = replace(plan, program=plan.program.edit(lambda actions: list(waiting(actions))))
    assert any("to begin its side of" in fault.problem for fault in static_checks(corrupted))
