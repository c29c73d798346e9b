"""Whose weights are fetched in a pass outside of the program's list: the same on every rank, whatever its
forward does.
"""

import pytest

from meshwright.engine.params.summon_full import unshard_in_order

BLOCK_CALLS = ("embed", "layer0", "layer1", "embed#2", "head")


@pytest.mark.parametrize("called", [BLOCK_CALLS, ("layer1",), (), ("embed", "head"), ("layer0", "embed#2")])
def test_every_visit_is_fetched_for_once_and_in_the_order_of_the_plan(called: tuple[str, ...]):
    fetched: list[str] = []
    with unshard_in_order(BLOCK_CALLS, fetched.append) as reach:
        for block_call in called:
            reach(block_call)
            assert fetched[-1] == block_call.split("#")[0], "what runs next was fetched last"
    assert fetched == [block_call.split("#")[0] for block_call in BLOCK_CALLS]


def test_a_block_that_is_called_once_more_is_fetched_for_once_more():
    fetched: list[str] = []
    with unshard_in_order(("a", "b"), fetched.append) as reach:
        for block in ("a", "b", "a"):
            reach(block)
    assert fetched == ["a", "b", "a"]
