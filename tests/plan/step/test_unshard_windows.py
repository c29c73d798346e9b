"""Stays of weights: what is joined, how early it is fetched, and that no two whole bundles share a buffer."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.plan.step.unshard_windows import Stay, Use, buffers, stays

CHAIN = [Use((name,), 0) for name in ("a", "b", "c", "c", "b", "a")]
ONES = {"a": 1, "b": 1, "c": 1}


def spans(found: list[Stay]) -> list[tuple[str, int, int]]:
    return [(stay.bundle, stay.begin, stay.end) for stay in found]


def test_uses_that_follow_each_other_are_one_stay():
    assert spans(stays(CHAIN, ONES)) == [("a", 0, 0), ("b", 1, 1), ("c", 2, 3), ("b", 4, 4), ("a", 5, 5)]


def test_a_micro_batch_or_a_step_is_one_stay_where_asked_for():
    twice = CHAIN + [Use(use.bundles, 1) for use in CHAIN]
    assert spans(stays(twice, ONES, "micro")) == [("a", 0, 11), ("b", 1, 4), ("c", 2, 3), ("b", 7, 10), ("c", 8, 9)]
    assert spans(stays(twice, ONES, "step")) == [("a", 0, 11), ("b", 1, 10), ("c", 2, 9)]


def test_a_budget_joins_the_shortest_gaps_first():
    assert spans(stays(CHAIN, ONES, budget=1)) == [("a", 0, 0), ("b", 1, 4), ("c", 2, 3), ("a", 5, 5)]
    assert spans(stays(CHAIN, ONES, budget=2)) == [("a", 0, 5), ("b", 1, 4), ("c", 2, 3)]


def test_nothing_is_fetched_before_it_has_been_let_go_of():
    found = {(stay.bundle, stay.begin): stay.fetch for stay in stays(CHAIN, ONES, ahead=9)}
    assert found == {("a", 0): 0, ("b", 1): 0, ("c", 2): 0, ("b", 4): 2, ("a", 5): 1}


@given(
    names=st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2, unique=True), min_size=1, max_size=30),
    ahead=st.integers(0, 4),
    budget=st.integers(0, 20),
)
def test_every_use_finds_its_bundles_and_no_two_share_a_buffer(names: list[list[str]], ahead: int, budget: int):
    nbytes = {name: 1 + index for index, name in enumerate("abcdef")}
    uses = [Use(tuple(each), 0) for each in names]
    found = stays(uses, nbytes, budget=budget, ahead=ahead)
    for at, use in enumerate(uses):
        for bundle in use.bundles:
            assert [stay for stay in found if stay.bundle == bundle and stay.begin <= at <= stay.end]
    number, sizes = buffers(found, nbytes)
    for one in found:
        assert sizes[number[one.bundle]] >= nbytes[one.bundle]
        for other in found:
            apart = other.end < one.fetch or one.end < other.fetch
            assert one == other or apart or number[one.bundle] != number[other.bundle]
