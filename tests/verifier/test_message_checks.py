"""Messages that cannot carry what their transfer means are found without running."""

from dataclasses import replace

import pytest

from meshwright.api import make_plan
from meshwright.parallel.pipeline.pipeline_strategy import Pipeline
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Action, Transfer
from meshwright.verifier.message_checks import check_message_order, check_messages
from tests.tiny_model import analyzed_model, tiny_job

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
    assert problems("reduce", BOTH, Transfer("gather", BOTH, 24)) == []
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


def test_two_receives_that_change_places_are_noticed():
    plan = make_plan(analyzed_model(), tiny_job(), Mesh(pp=2), (Pipeline(),), 1)
    receiver = plan.program.roles[1]
    assert list(check_message_order(plan, receiver)) == []

    first, second, *_ = (action for action in receiver.actions if action.kind == "RECV")
    swapped = {first.name: second, second.name: first}

    def swap(action: Action) -> Action:
        return swapped.get(action.name, action)

    corrupted = replace(receiver, actions=tuple(map(swap, receiver.actions)))
    assert list(check_message_order(plan, corrupted)) == [
        "what pp0 sends pp1 is received in another order: pp0/SEND(layers.2 to 1, 0) is matched with the "
        "receive for pp0/SEND(layers.2 to 1, 1)"
    ]
