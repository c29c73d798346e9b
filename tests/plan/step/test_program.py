"""Actions and programs: names, edits, and how a rank finds its list."""

from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import (
    Action,
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
