"""GPipe against its closed forms, torch's lists, and on unlike stages."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleGPipe

from meshwright.parallel.pipeline.schedules.gpipe import gpipe_schedule
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, theirs, unlike


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 2), (4, 8), (7, 13)])
def test_bubble_is_p_minus_1_of_m_plus_p_minus_1_and_all_micro_batches_are_held(p: int, m: int):
    found = hold(gpipe_schedule(p, m), StageCosts.uniform(p, 2, 3, 1))
    assert found.end == (m + p - 1) * 6
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert found.peak_memory == (m,) * p


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 3), (4, 9)])
def test_the_lists_are_those_of_torch(p: int, m: int):
    lists = ScheduleGPipe._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    assert [theirs(lists[rank]) for rank in range(p)] == [
        list(slots) for slots in gpipe_schedule(p, m).actions
    ]


@settings(deadline=None)
@given(data=st.data(), **COUNTS)
def test_it_plays_to_its_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    hold(gpipe_schedule(ranks, micros), data.draw(unlike(ranks)))


def test_two_swapped_slots_are_noticed():
    costs = StageCosts.uniform(3)
    right = gpipe_schedule(3, 4)
    assert noticed(swapped(right, 1, 3, 4), costs, simulate(right, costs)), (
        "a backward before the last forward"
    )


def test_no_micro_batch_is_refused():
    assert [fault.problem for fault in SCHEDULES["gpipe"].check(2, 0)] == [
        "0 microbatches; needed is at least one"
    ]
    assert list(SCHEDULES["gpipe"].check(4, 3)) == []
