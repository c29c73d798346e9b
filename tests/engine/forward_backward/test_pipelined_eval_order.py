"""The order of the stages of an evaluation on each rank."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.engine.forward_backward.pipelined_eval_order import (
    EvalOrder,
    evaluation_program,
    rank_schedule,
    stage_ranks,
)
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.model_spec.stage_transfers import StageTransfer, StageValue
from meshwright.plan.sharding.mesh import Mesh
from tests.tiny_model import analyzed_model, tiny_job


def test_of_two_ranks_with_a_stage_the_one_with_fewer_runs_it():
    space = make_plan(analyzed_model(), tiny_job(), Mesh(pp=4), (Pipeline(),), 1).sharding
    parts = [stage[0] for stage in space.block_calls_by_pp_rank]
    both = tuple((parts[index], parts[3 - index]) for index in range(4))  # as DualPipe has them
    assert stage_ranks(replace(space, block_calls_by_pp_rank=both)) == (0, 1, 2, 3)
    assert stage_ranks(replace(space, block_calls_by_pp_rank=(tuple(parts), (parts[2],), (), ()))) == (
        0,
        0,
        1,
        0,
    )


@pytest.mark.parametrize(
    "ranks",
    [(0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 0, 1, 2), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)],
    ids=["one each", "looped", "looped over three", "a V", "a V over three"],
)
def test_no_rank_is_idle_between_its_first_and_last_forward(ranks: tuple[int, ...]):
    """Played by the order alone, each part as long as any other: as many turns as a rank has, and the way
    through all parts.
    """
    micros, each = 9, max(map(ranks.count, ranks))
    lists = [
        list(
            rank_schedule(
                [p for p, owner in enumerate(ranks) if owner == r], each, range(micros).__contains__
            )
        )
        for r in set(ranks)
    ]
    ended: dict[tuple[int, int], int] = {}
    free = [0] * len(lists)
    while any(lists):
        for rank, left in enumerate(lists):
            while left and (left[0][0] == 0 or (left[0][0] - 1, left[0][1]) in ended):
                stage, micro = left.pop(0)
                ended[stage, micro] = free[rank] = max(free[rank], ended.get((stage - 1, micro), 0)) + 1
    assert len(ended) == micros * len(ranks)
    assert max(free) <= micros * each + len(ranks) - each


def events(ranks: tuple[int, ...], rank: int, num_forwards: int) -> str:
    values = [StageValue(f"x{stage}", "x", (), (), "float32") for stage in range(len(ranks))]
    transfers = [StageTransfer(values[stage], stage, stage + 1) for stage in range(len(ranks) - 1)]
    order = EvalOrder(ranks, lambda number: number < num_forwards, lambda _: transfers)
    shown = {"recv": "R", "run": "", "send": "S", "end": "."}
    return " ".join(f"{shown[each.kind]}{each.stage}:{each.number}" for each in order.events(rank))


def test_receives_are_posted_one_run_ahead():
    assert events((0, 1), 1, 3) == "R1:0 R1:1 1:0 .1:0 R1:2 1:1 .1:1 1:2 .1:2"


def test_a_receive_of_what_needs_the_next_run_is_posted_behind_it():
    # stages 0 and 3 are on rank 0: of one forward, stage 3 receives what comes of stage 0
    assert events((0, 1, 1, 0), 0, 1) == "0:0 S0:0 R3:0 3:0 .3:0"
    # of two, it is posted before stage 0 of the second, which runs at the same time as what sends it
    assert events((0, 1, 1, 0), 0, 2) == "0:0 S0:0 R3:0 0:1 S0:1 3:0 .3:0 R3:1 3:1 .3:1"


def test_the_program_of_an_evaluation_states_every_message_on_both_sides():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=3), (Pipeline(),), 1)
    first, second, third = evaluation_program(plan.program, plan.sharding, 2).roles
    kinds = [[action.kind for action in role.actions] for role in (first, second, third)]
    assert kinds[0] == ["F", "SEND"] * 2
    assert sorted(kinds[1]) == ["F", "F", "RECV", "RECV", "SEND", "SEND"]
    assert [action.waits for action in third.actions if action.kind == "RECV"] == [
        (f"{second.name}/{action.name}",) for action in second.actions if action.kind == "SEND"
    ]
