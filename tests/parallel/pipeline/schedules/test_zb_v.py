"""ZB-V, V-Half and V-Min against their closed forms, torch's lists, and on unlike stages; any number of
microbatches.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zb_v import (
    v_shaped_placement,
    zb_v_half_schedule,
    zb_v_min_schedule,
    zb_v_schedule,
)
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, theirs, unlike

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


def idle(order: Schedule, costs: StageCosts) -> float:
    """Returns how much longer than its work the busiest rank takes; all ranks have the same work."""
    found = hold(order, costs)
    return longest_rank_time(found) - found.busy_time(0)


def test_the_first_rank_has_the_first_and_the_last_part():
    assert [tuple(stage) for stage in v_shaped_placement(3)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 3),
        (1, 4),
        (0, 5),
    ]


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize(("forward", "weights"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_idle_time_of_v_is_p_minus_1_times_f_minus_w(p: int, forward: int, weights: int):
    for m in (2 * p - 1, 3 * p, 3 * p + 1):
        found = idle(
            zb_v_schedule(p, m), StageCosts.uniform(2 * p, forward, forward, weights)
        )  # times of a stage: those of a rank are twice these
        assert found == (p - 1) * 2 * (forward - weights)


@pytest.mark.parametrize("p", RANKS)
def test_every_rank_of_v_holds_what_the_first_rank_of_1f1b_holds(p: int):
    assert set(hold(zb_v_schedule(p, 3 * p), StageCosts.uniform(2 * p)).peak_memory) == {
        2 * p
    }  # halves of what a rank holds


@pytest.mark.parametrize("p", RANKS)
def test_half_has_at_most_half_the_bubble_and_about_half_the_memory_of_1f1b(p: int):
    order, costs = zb_v_half_schedule(p, 4 * p), StageCosts.uniform(2 * p)
    assert idle(order, costs) <= (p - 1) * 6 / 2
    assert max(simulate(order, costs).peak_memory) / 2 == p // 2 + 1


@pytest.mark.parametrize("p", RANKS)
def test_min_has_at_most_two_thirds_of_the_bubble_and_about_a_third_of_the_memory_of_1f1b(p: int):
    order, costs = zb_v_min_schedule(p, 4 * p), StageCosts.uniform(2 * p)
    assert idle(order, costs) <= (p - 1) * 6 * 2 / 3
    assert max(simulate(order, costs).peak_memory) / 2 == -(-(p + 2) // 3)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 8), (3, 9), (4, 4), (4, 12), (6, 11)])
def test_v_does_in_each_list_what_torch_does_there(p: int, m: int):
    names = {"pp_group_size": p, "num_stages": 2 * p, "_n_microbatches": m}
    made = [
        ScheduleZBVZeroBubble._calculate_single_rank_operations(SimpleNamespace(**names), rank)
        for rank in range(p)
    ]
    torchs = Schedule(
        v_shaped_placement(p),
        tuple(tuple(ScheduleAction(*slot) for slot in theirs(actions)) for actions in made),
    )  # type: ignore[arg-type]
    for costs in (StageCosts.uniform(2 * p), StageCosts.uniform(2 * p, 5, 6, 4, transfer=1)):
        ours, other = hold(zb_v_schedule(p, m), costs), simulate(torchs, costs)
        assert longest_rank_time(ours) <= longest_rank_time(other)
        assert ours.end <= other.end
        assert max(ours.peak_memory) <= max(other.peak_memory)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **COUNTS)
def test_they_play_to_their_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    costs = data.draw(unlike(2 * ranks))
    for make in (zb_v_schedule, zb_v_half_schedule, zb_v_min_schedule):
        hold(make(ranks, micros), costs)


@pytest.mark.parametrize("make", [zb_v_schedule, zb_v_half_schedule, zb_v_min_schedule])
def test_two_swapped_slots_are_noticed(make: Callable[[int, int], Schedule]):
    right, costs = make(3, 9), StageCosts.uniform(6)
    told = simulate(right, costs)
    assert all(noticed(swapped(right, rank, 0, 1), costs, told) for rank in range(3))


def test_no_micro_batches_are_refused():
    for make in (zb_v_schedule, zb_v_half_schedule, zb_v_min_schedule):
        with pytest.raises(PlanError, match="0 microbatches; needed is at least one"):
            make(2, 0)
