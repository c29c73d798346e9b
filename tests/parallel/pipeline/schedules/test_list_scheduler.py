"""W placed anew: the rest of the lists stays, limits are kept, and waiting ranks do W."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import filled, fits, longest, split
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, play
from meshwright.parallel.pipeline.schedules.zero_bubble import h1, h2
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike


def without_w(order: Order) -> list[list[tuple[str, int, int]]]:
    return [[slot for slot in slots if slot.kind != "W"] for slots in order.slots]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 5), micros=st.integers(1, 9), patience=st.sampled_from([0.0, 0.5, 1.0]))
def test_the_rest_of_the_lists_stays_and_no_rank_holds_more(data: st.DataObject, ranks: int, micros: int, patience: float):
    order = data.draw(st.sampled_from([h1(ranks, micros), h2(ranks, micros), split(interleaved.order(ranks, micros, 2))]))
    costs = data.draw(unlike(order.parts))
    limits = play(order, costs).peaks
    found = filled(order, costs, limits, patience)
    assert without_w(found) == without_w(order)
    assert fits(hold(found, costs), limits)


def test_split_backwards_send_gradients_earlier():
    whole, costs = one_f_one_b.order(4, 8), Costs.equal(4)
    halves = split(whole)
    assert play(halves, costs).end < play(whole, costs).end
    assert {slot.kind for slots in halves.slots for slot in slots} == {"F", "I", "W"}


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_1f1b_in_halves_with_w_in_its_gaps_is_as_short_as_h1(p: int):
    costs = Costs.equal(p)
    found = filled(split(one_f_one_b.order(p, 3 * p)), costs, [p] * p)
    assert longest(play(found, costs)) <= longest(play(h1(p, 3 * p), costs))
