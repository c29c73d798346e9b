"""Unshard windows: which uses share one, how early weights are gathered, and that overlapping groups share no
buffer.
"""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.model_spec.model_spec import ROOT, ParamSpec
from meshwright.plan.sharding.param_sharding import ParamGroup, ParamSharding
from meshwright.plan.step.program import Action
from meshwright.plan.step.unshard_windows import (
    ParamUse,
    UnshardWindow,
    assign_buffers,
    gather_before_forward,
    unshard_windows,
)

CHAIN = [ParamUse((name,), 0) for name in ("a", "b", "c", "c", "b", "a")]
ONES = {"a": 1, "b": 1, "c": 1}


def spans(found: list[UnshardWindow]) -> list[tuple[str, int, int]]:
    return [(stay.param_group, stay.first_use, stay.last_use) for stay in found]


def test_consecutive_uses_share_one_unshard_window():
    assert spans(unshard_windows(CHAIN, ONES)) == [
        ("a", 0, 0),
        ("b", 1, 1),
        ("c", 2, 3),
        ("b", 4, 4),
        ("a", 5, 5),
    ]


def test_a_micro_batch_or_a_step_is_one_window_if_requested():
    twice = CHAIN + [ParamUse(use.param_groups, 1) for use in CHAIN]
    assert spans(unshard_windows(twice, ONES, "microbatch")) == [
        ("a", 0, 11),
        ("b", 1, 4),
        ("c", 2, 3),
        ("b", 7, 10),
        ("c", 8, 9),
    ]
    assert spans(unshard_windows(twice, ONES, "step")) == [("a", 0, 11), ("b", 1, 10), ("c", 2, 9)]


def test_a_budget_joins_the_shortest_gaps_first():
    assert spans(unshard_windows(CHAIN, ONES, budget=1)) == [
        ("a", 0, 0),
        ("b", 1, 4),
        ("c", 2, 3),
        ("a", 5, 5),
    ]
    assert spans(unshard_windows(CHAIN, ONES, budget=2)) == [("a", 0, 5), ("b", 1, 4), ("c", 2, 3)]


def test_nothing_is_gathered_before_it_was_freed():
    found = {
        (stay.param_group, stay.first_use): stay.fetch_use
        for stay in unshard_windows(CHAIN, ONES, prefetch=9)
    }
    assert found == {("a", 0): 0, ("b", 1): 0, ("c", 2): 0, ("b", 4): 2, ("a", 5): 1}


@given(
    names=st.lists(
        st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2, unique=True), min_size=1, max_size=30
    ),
    ahead=st.integers(0, 4),
    budget=st.integers(0, 20),
)
def test_every_use_finds_its_groups_and_no_two_share_a_buffer(
    names: list[list[str]], ahead: int, budget: int
):
    nbytes = {name: 1 + index for index, name in enumerate("abcdef")}
    uses = [ParamUse(tuple(each), 0) for each in names]
    found = unshard_windows(uses, nbytes, budget=budget, prefetch=ahead)
    for at, use in enumerate(uses):
        for group in use.param_groups:
            assert [
                stay for stay in found if stay.param_group == group and stay.first_use <= at <= stay.last_use
            ]
    number, sizes = assign_buffers(found, nbytes)
    for one in found:
        assert sizes[number[one.param_group]] >= nbytes[one.param_group]
        for other in found:
            apart = other.last_use < one.fetch_use or one.last_use < other.fetch_use
            assert one == other or apart or number[one.param_group] != number[other.param_group]


def test_gathers_stand_before_the_forward_in_the_order_of_use_and_each_use_waits_for_its_own():
    calls = {"c": ("v2",), "root": (ROOT,), "a": ("v0",), "kept": ("v1",)}
    groups = [
        ParamGroup(name, (ParamSharding(ParamSpec(name, (1,), used)),), None) for name, used in calls.items()
    ]
    gathers = {name: Action("UNSHARD", name, stream="comm") for name in ("c", "root", "a")}
    actions = [Action("TOKEN_COUNT"), *(Action("F", call, 0) for call in ("v0", "v1", "v2"))]
    found = gather_before_forward(actions, groups, gathers, ("v0", "v1", "v2"))
    assert [(each.name, each.waits) for each in found] == [
        ("TOKEN_COUNT()", ()),
        ("UNSHARD(root)", ()),
        ("UNSHARD(a)", ()),
        ("UNSHARD(c)", ()),
        ("WAIT(root)", ("UNSHARD(root)",)),
        ("F(v0, 0)", ("UNSHARD(a)",)),
        ("F(v1, 0)", ()),
        ("F(v2, 0)", ("UNSHARD(c)",)),
    ]
