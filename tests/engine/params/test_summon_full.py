"""Whose weights are fetched in a pass outside of the program's list: the same on every rank, whatever its
forward does.
"""

import pytest

from meshwright.engine.params.summon_full import unshard_in_order

VISITS = ("embed", "layer0", "layer1", "embed#2", "head")


@pytest.mark.parametrize("called", [VISITS, ("layer1",), (), ("embed", "head"), ("layer0", "embed#2")])
def test_every_visit_is_fetched_for_once_and_in_the_order_of_the_plan(called: tuple[str, ...]):
    fetched: list[str] = []
    with unshard_in_order(VISITS, fetched.append) as reach:
        for visit in called:
            reach(visit)
            assert fetched[-1] == visit.split("#")[0], "what runs next was fetched last"
    assert fetched == [visit.split("#")[0] for visit in VISITS]


def test_a_block_that_is_called_once_more_is_fetched_for_once_more():
    fetched: list[str] = []
    with unshard_in_order(("a", "b"), fetched.append) as reach:
        for block in ("a", "b", "a"):
            reach(block)
    assert fetched == ["a", "b", "a"]
