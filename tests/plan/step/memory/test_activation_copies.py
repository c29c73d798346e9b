"""Copies of activations in a list of actions."""

from meshwright.plan.step.memory.activation_copies import (
    BackwardPlaces,
    LeavingActivations,
    copy_conflicts,
    num_calls_between,
    with_activation_copies,
)
from meshwright.plan.step.memory.activation_files import activation_nbytes
from meshwright.plan.step.program import Action, Allocation

ACTIONS = [
    *(Action("F_CHECKPOINTED", name, 0) for name in "abc"),
    Action("LOSS", microbatch=0),
    *(Action(kind, name, 0) for name in "cba" for kind in ("UNSHARD", "RECOMPUTE", "B")),
]


def test_a_backward_begins_where_its_forward_is_run_again():
    places = BackwardPlaces.of(ACTIONS)
    assert [ACTIONS[start].name for start in places.starts] == [f"RECOMPUTE({name}, 0)" for name in "cba"]
    assert places.numbers == {("c", 0): 0, ("b", 0): 1, ("a", 0): 2}


def test_a_fetch_comes_so_many_backwards_early_and_never_before_the_forward():
    places = BackwardPlaces.of(ACTIONS)
    found = [ACTIONS[places.fetch_index(("a", 0), 0, prefetch)].name for prefetch in range(4)]
    assert found == [f"RECOMPUTE({name}, 0)" for name in "abcc"]
    again = [*ACTIONS, Action("F", "d", 1), Action("LOSS", microbatch=1), Action("B", "d", 1)]
    at = len(ACTIONS)
    assert BackwardPlaces.of(again).fetch_index(("d", 1), at, 2) == at + 1
    assert num_calls_between(again, 0, at) == 2 + 3  # forwards and backwards


def test_copies_free_and_allocate_in_both_tiers():
    leaving = [LeavingActivations(ACTIONS[0], 0, 8, (11,), (Allocation("x", 3), Allocation("y", 5)))]
    edited = with_activation_copies(ACTIONS, leaving)
    offload, fetch = (each for each in edited if each.kind.endswith("_ACTIVATIONS"))
    assert [each.tier for each in offload.allocations] == ["host", "host"]
    assert offload.frees == ("x", "y") == tuple(each.name for each in fetch.allocations)
    assert fetch.frees == ("host x", "host y")
    assert offload.transfer.nbytes == fetch.transfer.nbytes == 8 == activation_nbytes(edited, "host")
    names = [each.name for each in edited]
    assert names[1] == offload.name
    assert names[names.index(fetch.name) + 1] == "RECOMPUTE(b, 0)"
    assert list(copy_conflicts(edited)) == []
    assert list(copy_conflicts([each for each in edited if each is not fetch])) == [
        "OFFLOAD_ACTIVATIONS(a, 0) leaves activations on the host, and no FETCH_ACTIVATIONS copies them back"
    ]
