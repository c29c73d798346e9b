"""W placed anew: the rest of the lists stays, limits are kept, and waiting ranks do W."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import (
    fill_bubbles,
    fits_memory,
    longest_rank_time,
    split_backwards,
)
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_h1_schedule, zb_h2_schedule
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike


def without_w(order: Schedule) -> list[list[tuple[str, int, int]]]:
    return [[slot for slot in slots if slot.kind != "W"] for slots in order.actions]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    ranks=st.integers(1, 5),
    micros=st.integers(1, 9),
    patience=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_rest_of_the_lists_stays_and_no_rank_holds_more(
    data: st.DataObject, ranks: int, micros: int, patience: float
):
    order = data.draw(
        st.sampled_from(
            [
                zb_h1_schedule(ranks, micros),
                zb_h2_schedule(ranks, micros),
                split_backwards(interleaved.interleaved_schedule(ranks, micros, 2)),
            ]
        )
    )
    costs = data.draw(unlike(order.num_stages))
    limits = simulate(order, costs).peak_memory
    found = fill_bubbles(order, costs, limits, patience)
    assert without_w(found) == without_w(order)
    assert fits_memory(hold(found, costs), limits)


def test_split_backwards_send_gradients_earlier():
    whole, costs = one_f_one_b.one_f_one_b_schedule(4, 8), StageCosts.uniform(4)
    halves = split_backwards(whole)
    assert simulate(halves, costs).end < simulate(whole, costs).end
    assert {slot.kind for slots in halves.actions for slot in slots} == {"F", "I", "W"}


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_1f1b_in_halves_with_w_in_its_gaps_is_as_short_as_h1(p: int):
    costs = StageCosts.uniform(p)
    found = fill_bubbles(split_backwards(one_f_one_b.one_f_one_b_schedule(p, 3 * p)), costs, [p] * p)
    assert longest_rank_time(simulate(found, costs)) <= longest_rank_time(
        simulate(zb_h1_schedule(p, 3 * p), costs)
    )
