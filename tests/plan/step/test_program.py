"""Actions and programs: names, edits, and how a rank finds its list."""

from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import (
    Action,
    Period,
    SiteRanks,
    Transfer,
    drop_single_rank_transfers,
    index_of_last,
    with_waits,
)
from tests.paper_model import program_of

ACTIONS = (Action("F", "a", 0), Action("F", "b", 0), Action("B", "b", 0), Action("B", "a", 0), Action("STEP"))


def test_an_action_is_named_by_its_kind_subject_and_micro_batch():
    names = [
        Action("STEP").name,
        Action("LOSS", microbatch=2).name,
        Action("REDUCE", "0").name,
        Action("F", "a", 0).name,
    ]
    assert names == ["STEP()", "LOSS(2)", "REDUCE(0)", "F(a, 0)"]


def test_the_last_action_of_a_kind_is_found_by_subject():
    assert index_of_last(ACTIONS, "B") == 3
    assert index_of_last(ACTIONS, "B", ["b"]) == 2
    assert index_of_last(ACTIONS, "B", ["c"]) is None
    assert index_of_last(ACTIONS, "REDUCE") is None


def test_an_edit_returns_another_program_and_leaves_the_first():
    program = program_of({"a": ACTIONS, "b": ACTIONS[:1]})
    edited = program.edit(lambda actions: actions[::-1])
    assert edited.actions("a") == ACTIONS[::-1]
    assert edited.actions("b") == ACTIONS[:1]
    assert program == program_of({"a": ACTIONS, "b": ACTIONS[:1]})
    assert hash(program) == hash(program_of({"a": ACTIONS, "b": ACTIONS[:1]}))


def test_a_wait_is_added_once():
    action = with_waits(Action("CLIP", waits=("x",)), ["y", "x", "y"])
    assert action.waits == ("x", "y")


def test_transfers_within_an_action_along_an_axis_of_one_rank_are_dropped():
    moves = (
        Transfer("all_reduce", ("tp",), 8),
        Transfer("shift", ("cp",), 8),
        Transfer("all_to_all", ("cp",), 8, num_neighbours=1),
    )
    count = Action("TOKEN_COUNT", transfer=Transfer("all_reduce", ("tp",), 8))
    program = drop_single_rank_transfers(
        program_of({"a": [count, Action("F", "a", 0, inner_transfers=moves)]}), Mesh(cp=2)
    )
    assert program.actions("a") == (count, Action("F", "a", 0, inner_transfers=moves[1:2]))


def test_a_round_ends_with_its_last_step_with_each_warm_up_step_and_with_the_run():
    assert [step for step in range(12) if Period(4).ends_with(step)] == [3, 7, 11]
    assert [step for step in range(12) if Period(4, 2).ends_with(step)] == [0, 1, 5, 9]
    assert [step for step in range(12) if Period(5, 1, 9).ends_with(step)] == [0, 5, 8, 10]
    assert all(map(Period(1).ends_with, range(5)))


def test_what_has_a_period_runs_at_the_end_of_a_round_alone():
    ends = Action("AVERAGE", period=Period(3))
    program = program_of({"a": (*ACTIONS, ends)})
    assert program.period == Period(3)
    assert program.with_ends(program.ends(0)) == program_of({"a": ACTIONS})
    assert program.with_ends(program.ends(0)).period is None
    assert program.with_ends(program.ends(2)) == program
    assert [ends.runs_in(step) for step in range(3)] == [False, False, True]
    assert ACTIONS[0].runs_in(1)


def test_short_rounds_within_long_ones_end_with_them_and_between():
    near, far = Action("AVERAGE_SITE", period=Period(2)), Action("AVERAGE", period=Period(4))
    program = program_of({"a": (near, far)})
    assert program.periods == (Period(2), Period(4))
    assert program.period == Period(4)
    assert [len(program.ends(step)) for step in range(8)] == [0, 1, 0, 2, 0, 1, 0, 2]
    assert program.with_ends(program.ends(1)) == program_of({"a": (near,)})
    assert Period(4).first_end_outside(Period(2)) is None
    assert Period(4).first_end_outside(Period(3)) == 3
    assert Period(4, 1).first_end_outside(Period(2)) == 0
    assert Period(4, 2).first_end_outside(Period(2, 2)) is None
    assert Period(4, run_steps=7).first_end_outside(Period(2, run_steps=7)) is None


def test_rounds_at_an_offset_begin_there_and_sites_agree_behind_the_last_step_alone():
    begins, ends = Period(4, run_steps=11, offset=2), Period(4, run_steps=11, offset=5)
    assert [step + 1 for step in range(11) if begins.ends_with(step)] == [2, 6, 10, 11]
    assert [step + 1 for step in range(11) if ends.ends_with(step)] == [5, 9, 11]
    assert ends.steps_behind(begins) == 3
    assert ends.first_step_behind(2) == 9
    assert begins.first_end_outside(ends) == 1
    begun = Action("AVERAGE", stream="comm", period=begins)
    end = Action("END_ROUND", previous_waits=(begun.name,), period=ends)
    program = program_of({"a": (begun, end)})
    assert program.period == Period(11, run_steps=11)
    assert program.with_ends(program.ends(1)) == program_of({"a": ()}), "it runs on beside the next steps"
    assert program.with_ends(program.ends(4)) == program_of({"a": (begun, end)})
    assert program.with_ends(program.ends(10)) == program


def test_a_role_has_its_ranks_in_every_site():
    ranks = SiteRanks(range(2, 4), 3, 4)
    assert list(ranks) == [2, 3, 6, 7, 10, 11]
    assert ranks[0] == 2
    assert ranks[-1] == 11
    assert ranks[1:3] == [3, 6]
    assert [rank for rank in range(-4, 16) if rank in ranks] == list(ranks)
    assert "2" not in ranks
