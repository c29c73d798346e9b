"""The weights that are gathered in a pass outside of the program: the same on every rank, for any forward."""

import pytest

from meshwright.engine.params.unshard_forward_hooks import unshard_in_order

BLOCK_CALLS = ("embed", "layer0", "layer1", "embed#2", "head")


@pytest.mark.parametrize("called", [BLOCK_CALLS, ("layer1",), (), ("embed", "head"), ("layer0", "embed#2")])
def test_every_block_call_gathers_once_and_in_the_order_of_the_plan(called: tuple[str, ...]):
    fetched: list[str] = []
    with unshard_in_order(BLOCK_CALLS, fetched.append) as reach:
        for block_call in called:
            reach(block_call)
            assert fetched[-1] == block_call.split("#")[0], "what runs next was fetched last"
    assert fetched == [block_call.split("#")[0] for block_call in BLOCK_CALLS]


def test_an_additional_call_of_a_block_gathers_again():
    fetched: list[str] = []
    with unshard_in_order(("a", "b"), fetched.append) as reach:
        for block in ("a", "b", "a"):
            reach(block)
    assert fetched == ["a", "b", "a"]
