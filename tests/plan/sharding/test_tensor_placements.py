"""Layouts are values, the adjoint is an involution, and redistributions are closed under backward."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.sharding.tensor_placements import (
    COLLECTIVES,
    REDISTRIBUTIONS,
    I,
    Layout,
    P,
    Placement,
    R,
    S,
    redistribution_name,
)

PLACES = st.sampled_from([R, I, P, S(0), S(1)])
TABLES = st.dictionaries(st.sampled_from(AXES), PLACES)


@settings(deadline=None)
@given(PLACES)
def test_the_adjoint_of_the_adjoint_is_the_placement_itself(place: Placement):
    assert place.adjoint.adjoint == place


@settings(deadline=None)
@given(PLACES, PLACES)
def test_the_backward_of_the_backward_of_a_move_is_the_move(src: Placement, dst: Placement):
    back = (dst.adjoint, src.adjoint)
    assert (back[1].adjoint, back[0].adjoint) == (src, dst)
    assert redistribution_name(*back) in set(REDISTRIBUTIONS.values())


def test_the_backward_of_a_gather_is_a_scatter_of_sums_and_the_other_way_round():
    assert (redistribution_name(S(0), R), redistribution_name(R.adjoint, S(0).adjoint)) == (
        "all_gather",
        "reduce_scatter",
    )
    assert (redistribution_name(P, S(0)), redistribution_name(S(0).adjoint, P.adjoint)) == (
        "reduce_scatter",
        "all_gather",
    )


def test_the_gradient_of_a_replicated_parameter_is_summed():
    assert (redistribution_name(I, R), redistribution_name(R.adjoint, I.adjoint)) == ("keep", "all_reduce")


@settings(deadline=None)
@given(PLACES)
def test_staying_in_place_moves_nothing(place: Placement):
    assert redistribution_name(place, place) == "keep"


def test_another_dim_needs_an_exchange():
    assert redistribution_name(S(0), S(1)) == "all_to_all"


def test_only_partial_and_shard_need_communication():
    letters = "RISP"
    wired = {(src, dst) for src, dst in product(letters, letters) if REDISTRIBUTIONS[src, dst] in COLLECTIVES}
    assert wired == {("P", "I"), ("P", "R"), ("P", "S"), ("S", "R"), ("S", "I"), ("S", "S")}


@pytest.mark.parametrize(("letter", "dim"), [("S", None), ("R", 0), ("P", 1), ("I", 0)])
def test_a_placement_with_a_wrong_dim_is_refused(letter: str, dim: int | None):
    with pytest.raises(
        ValueError, match=rf"{letter} was given dim {dim}; S needs a dim, the others have none"
    ):
        Placement(letter, dim)


@settings(deadline=None)
@given(TABLES)
def test_layouts_are_equal_when_their_placements_are(table: dict[str, Placement]):
    reordered = Layout.from_dict(dict(reversed(table.items())))
    spelled_out = Layout.from_dict({**dict.fromkeys(AXES, I), **table})
    assert Layout.from_dict(table) == reordered == spelled_out
    assert len({Layout.from_dict(table), reordered, spelled_out}) == 1


@settings(deadline=None)
@given(TABLES)
def test_a_layout_returns_its_placements(table: dict[str, Placement]):
    layout = Layout.from_dict(table)
    assert all(layout.placement(axis) == table.get(axis, I) for axis in AXES)
    assert all(axis in layout.axes_with(place.letter) for axis, place in table.items() if place != I)


@settings(deadline=None)
@given(TABLES, st.sampled_from(AXES), PLACES)
def test_with_placement_changes_one_axis_and_no_other_layout(
    table: dict[str, Placement], axis: str, place: Placement
):
    before = Layout.from_dict(table)
    after = before.with_placement(axis, place)
    assert after.placement(axis) == place
    assert all(after.placement(other) == before.placement(other) for other in AXES if other != axis)
    assert before == Layout.from_dict(table)
    assert after.with_placement(axis, before.placement(axis)) == before


def test_a_layout_prints_its_placements():
    assert str(Layout.from_dict({"tp": S(1), "dp_replicate": R})) == "dp_replicate:R tp:S(1)"
    assert str(Layout()) == "I"
