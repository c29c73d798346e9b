"""ZB-H1, H2 and 2p against their closed forms, torch's lists, and on unlike stages; any number of
microbatches.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.registry import SCHEDULES
from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction, StageCosts, simulate
from meshwright.parallel.pipeline.schedules.zero_bubble import (
    zb_2p_schedule,
    zb_h1_schedule,
    zb_h2_schedule,
    zb_schedule_within_memory,
)
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import (
    COUNTS,
    hold,
    noticed,
    swapped,
    theirs,
    unlike,
    with_slots,
)

TIMES = [(1, 1, 1), (4, 4, 3), (5, 6, 4), (6, 5, 5), (2, 3, 1), (18, 17, 9)]  # F, I, W with W at most F and I
Make = Callable[[int, int], Schedule]
SIZES = [(1, 4), (2, 6), (3, 9), (4, 12), (5, 10), (8, 24)]


def idle(order: Schedule, costs: StageCosts) -> float:
    """Returns how much longer than its work the busiest rank takes; all ranks have the same work."""
    found = hold(order, costs)
    return longest_rank_time(found) - found.busy_time(0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_of_h1_is_p_minus_1_times_f_plus_i_minus_w(p: int, m: int, times: tuple[int, int, int]):
    forward, inputs, weights = times
    assert idle(zb_h1_schedule(p, m), StageCosts.uniform(p, *times)) == (p - 1) * (forward + inputs - weights)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_of_h2_is_p_minus_1_times_f_plus_i_minus_2w(p: int, m: int, times: tuple[int, int, int]):
    forward, inputs, weights = times
    assert idle(zb_h2_schedule(p, m), StageCosts.uniform(p, *times)) == (p - 1) * (
        forward + inputs - 2 * weights
    )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_rank_of_h1_holds_what_the_first_rank_of_1f1b_holds(p: int, m: int):
    assert (
        set(simulate(zb_h1_schedule(p, m), StageCosts.uniform(p)).peak_memory)
        == {p}
        == {max(simulate(one_f_one_b.one_f_one_b_schedule(p, m), StageCosts.uniform(p)).peak_memory)}
    )


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_the_first_rank_of_h2_holds_2p_minus_1(p: int, m: int):
    assert max(simulate(zb_h2_schedule(p, m), StageCosts.uniform(p)).peak_memory) == 2 * p - 1


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_2p_has_no_bubble_within_twice_the_memory_from_3p_micro_batches_on(p: int):
    costs = StageCosts.uniform(p)
    found = hold(zb_2p_schedule(p, 3 * p, costs), costs)
    assert longest_rank_time(found) == found.busy_time(0)
    assert max(found.peak_memory) <= 2 * p * costs.activation_memory[0]


@pytest.mark.parametrize(
    ("p", "times"), [(4, (30, 29, 20)), (8, (30, 29, 20)), (8, (19, 18, 9)), (8, (11, 11, 8))]
)
def test_2p_has_about_no_bubble_where_w_needs_less_memory_than_i(p: int, times: tuple[int, int, int]):
    costs = StageCosts([times[0]] * p, [times[1]] * p, [times[2]] * p, 0.5, [5.0] * p, [2.0] * p)
    found = hold_roughly(zb_2p_schedule(p, 8 * p, costs), costs)
    assert longest_rank_time(found) <= 1.01 * found.busy_time(0)
    assert max(found.peak_memory) <= 2 * p * costs.activation_memory[0]


def hold_roughly(order: Schedule, costs: StageCosts):
    """The timeline of an order without faults, for costs that are no whole numbers."""
    assert list(order.errors()) == []
    return simulate(order, costs)


def test_more_room_is_never_worse_and_less_than_p_still_works():
    costs = StageCosts.uniform(4, 3, 3, 2, transfer=1)
    found = [simulate(zb_schedule_within_memory(4, 12, costs, room), costs) for room in (1, 2, 3, 4, 6, 8)]
    times = [longest_rank_time(timeline) for timeline in found]
    assert times == sorted(times, reverse=True)
    assert [max(timeline.peak_memory) for timeline in found] == [1, 2, 3, 4, 6, 8]
    assert longest_rank_time(found[3]) <= longest_rank_time(simulate(zb_h1_schedule(4, 12), costs))


def test_without_word_of_memory_each_micro_batch_keeps_one_unit_until_w():
    bare = StageCosts([1.0] * 3, [1.0] * 3, [1.0] * 3)
    assert zb_2p_schedule(3, 9, bare) == zb_2p_schedule(3, 9, StageCosts.uniform(3))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (3, 9), (4, 8), (4, 12), (8, 24)])
def test_h1_is_not_longer_and_holds_no_more_than_the_lists_of_torch(p: int, m: int):
    rounds = max(1, m // p)
    names = {
        "pp_group_size": p,
        "n_local_stages": 1,
        "_n_microbatches": m,
        "microbatches_per_round": m // rounds,
    }
    made = [
        ScheduleInterleavedZeroBubble._calculate_single_rank_operations(SimpleNamespace(**names), rank)
        for rank in range(p)
    ]
    torchs = Schedule.with_looped_placement(
        [ScheduleAction(*slot) for slot in theirs(actions)] for actions in made
    )  # type: ignore[arg-type]
    for costs in (StageCosts.uniform(p), StageCosts.uniform(p, 5, 6, 4, transfer=1)):
        ours, other = hold(zb_h1_schedule(p, m), costs), simulate(torchs, costs)
        assert longest_rank_time(ours) <= longest_rank_time(other)
        assert ours.end <= other.end
        assert max(ours.peak_memory) <= max(other.peak_memory)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **COUNTS)
def test_they_play_to_their_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    costs = data.draw(unlike(ranks))
    for order in (zb_h1_schedule(ranks, micros), zb_h2_schedule(ranks, micros)):
        hold(order, costs)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), micros=st.integers(1, 9))
def test_2p_plays_to_its_end_within_its_room_and_is_never_longer_than_h1(
    data: st.DataObject, ranks: int, micros: int
):
    costs = data.draw(unlike(ranks))
    found = hold(zb_2p_schedule(ranks, micros, costs), costs)
    assert all(
        peak <= 2 * ranks * held
        for peak, held in zip(found.peak_memory, costs.activation_memory, strict=True)
    )
    assert longest_rank_time(found) <= longest_rank_time(simulate(zb_h1_schedule(ranks, micros), costs))


@pytest.mark.parametrize("make", [zb_h1_schedule, zb_h2_schedule])
def test_two_swapped_slots_are_noticed(make: Make):
    right, costs = make(3, 6), StageCosts.uniform(3)
    told = simulate(right, costs)
    assert all(noticed(swapped(right, rank, 0, 1), costs, told) for rank in range(3))


def test_w_before_its_time_is_noticed():
    right, costs = zb_h2_schedule(4, 8), StageCosts.uniform(4)
    told = simulate(right, costs)
    last = list(right.actions[3])
    eager = [slot for slot in last if slot.kind != "W"]
    for slot in [slot for slot in last if slot.kind == "W"]:
        eager.insert(eager.index(ScheduleAction("I", slot.virtual_stage, slot.microbatch)) + 1, slot)
    assert longest_rank_time(simulate(with_slots(right, 3, eager), costs)) > longest_rank_time(told)


def test_no_ranks_and_no_micro_batches_are_refused():
    assert [fault.location for fault in SCHEDULES["zb_h1"].check(0, 0)] == ["mesh.pp", "micro_batch"]
    with pytest.raises(PlanError, match="needed is at least one"):
        zb_h1_schedule(2, 0)
