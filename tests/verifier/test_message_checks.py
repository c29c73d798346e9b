"""Messages that cannot carry what their transfer means are found without running."""

import pytest

from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer
from meshwright.verifier.message_checks import check_messages

MESH = Mesh(dp_replicate=2, dp_shard=3)
BOTH = ("dp_replicate", "dp_shard")
SUM = Transfer("all_reduce", BOTH, 24)


def problems(meaning: str, axes: tuple[str, ...], *messages: Transfer) -> list[str]:
    transfer = Transfer(meaning, axes, 24, carried_by=messages)
    return list(check_messages(MESH, [Action("REDUCE", "0", stream="comm", transfer=transfer)]))


def test_a_sum_of_coded_slices_can_carry_a_sum():
    codes, whole = (
        Transfer("all_to_all", BOTH, 6, dtype="int8"),
        Transfer("all_gather", BOTH, 1, dtype="int8"),
    )
    assert problems("all_reduce", BOTH, codes, whole) == []
    assert problems("reduce_scatter", BOTH, codes) == []
    assert problems("all_reduce", ("dp_shard", "tp"), Transfer("all_reduce", ("dp_shard",), 24)) == []


def test_a_transfer_that_carries_itself_is_not_looked_at():
    assert list(check_messages(MESH, [Action("SEND", transfer=Transfer("send", ("pp",), 7, peer=1))])) == []


@pytest.mark.parametrize(
    ("meaning", "message", "problem"),
    [
        (
            "all_reduce",
            Transfer("all_reduce", ("dp_shard",), 24),
            "means all_reduce over dp_replicate, dp_shard, and no message goes over dp_replicate",
        ),
        (
            "all_reduce",
            Transfer("all_to_all", BOTH, 6, dtype="int8"),
            "and its last message is all_to_all, not all_reduce or all_gather or broadcast",
        ),
        ("broadcast", SUM, "and its last message is all_reduce, not broadcast"),
        ("all_reduce", Transfer("all_reduce", BOTH, 23), "and 23 bytes are no whole number of float32"),
    ],
)
def test_messages_that_cannot_carry_it_are_refused(meaning: str, message: Transfer, problem: str):
    (found,) = problems(meaning, BOTH, message)
    assert found.startswith("REDUCE(0) means ")
    assert found.endswith(problem)


def test_messages_over_an_axis_that_is_not_meant_are_refused():
    (found,) = problems("all_reduce", ("dp_shard",), SUM)
    assert found.endswith("and its messages go over dp_replicate too")
