"""1F1B against its closed forms, torch's lists, and on unlike stages."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B

from meshwright.parallel.pipeline.schedules import gpipe
from meshwright.parallel.pipeline.schedules.one_f_one_b import one_f_one_b_schedule
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, theirs, unlike


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (3, 2), (4, 8), (7, 13)])
def test_rank_r_holds_p_minus_r_micro_batches_and_the_bubble_is_that_of_gpipe(p: int, m: int):
    costs = StageCosts.uniform(p, 2, 3, 1)
    found = hold(one_f_one_b_schedule(p, m), costs)
    assert found.end == simulate(gpipe.gpipe_schedule(p, m), costs).end == (m + p - 1) * 6
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-15)
    assert found.peak_memory == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 3), (4, 9)])
def test_the_lists_are_those_of_torch(p: int, m: int):
    lists = Schedule1F1B._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    found = [theirs(lists[rank]) for rank in range(p)]
    # the list that torch draws (it plays by other code) begins to count the last rank's forwards at 1
    found[-1] = [(kind, stage, micro - (kind == "F")) for kind, stage, micro in found[-1]]
    assert found == [list(slots) for slots in one_f_one_b_schedule(p, m).actions]


@settings(deadline=None)
@given(data=st.data(), **COUNTS)
def test_it_plays_to_its_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    hold(one_f_one_b_schedule(ranks, micros), data.draw(unlike(ranks)))


def test_two_swapped_slots_are_noticed_wherever_they_stand():
    right = one_f_one_b_schedule(3, 5)
    costs = StageCosts.uniform(3)
    told = simulate(right, costs)
    assert all(noticed(swapped(right, 2, at, at + 1), costs, told) for at in range(9))


def test_no_count_is_refused_but_zero_and_all_at_once():
    assert [fault.location for fault in SCHEDULES["1f1b"].check(0, 0)] == ["mesh.pp", "micro_batch"]
    assert list(SCHEDULES["1f1b"].check(5, 2)) == []
