"""Model parallelism without a pipeline: p - 1 of p ranks stand still, whatever m is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules.naive_model_parallel import (
    naive_model_parallel_schedule,
)
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, unlike


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 2), (4, 8)])
def test_p_minus_1_of_p_stand_still_and_one_micro_batch_is_held(p: int, m: int):
    found = hold(naive_model_parallel_schedule(p, m), StageCosts.uniform(p, 2, 3, 1))
    assert found.end == m * p * 6
    assert found.bubble == pytest.approx((p - 1) / p, abs=1e-15)
    assert found.peak_memory == (1.0,) * p


@settings(deadline=None)
@given(data=st.data(), **COUNTS)
def test_it_takes_the_sum_of_all_that_is_done_and_sent(data: st.DataObject, ranks: int, micros: int):
    costs = data.draw(unlike(ranks))
    found = hold(naive_model_parallel_schedule(ranks, micros), costs)
    each = (
        sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad) + 2 * (ranks - 1) * costs.transfer
    )
    assert found.end == micros * each


def test_two_swapped_slots_are_noticed():
    right = naive_model_parallel_schedule(3, 4)
    costs = StageCosts.uniform(3)
    assert noticed(swapped(right, 0, 1, 2), costs, simulate(right, costs)), (
        "the next forward before the backward: held twice"
    )


def test_no_rank_is_refused():
    check = SCHEDULES["naive_model_parallel"].check
    assert [fault.problem for fault in check(0, 1)] == ["0 ranks; needed is at least one"]
