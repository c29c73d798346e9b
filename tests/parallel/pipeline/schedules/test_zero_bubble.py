"""ZB-H1, H2 and 2p against their closed forms, torch's lists, and on unlike parts; any number of micro-batches."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.list_scheduler import longest
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, Slot, play
from meshwright.parallel.pipeline.schedules.zero_bubble import faults, h1, h2, two_p, within
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, theirs, unlike, with_slots

TIMES = [(1, 1, 1), (4, 4, 3), (5, 6, 4), (6, 5, 5), (2, 3, 1), (18, 17, 9)]  # F, I, W with W at most F and I
Make = Callable[[int, int], Order]
SIZES = [(1, 4), (2, 6), (3, 9), (4, 12), (5, 10), (8, 24)]


def idle(order: Order, costs: Costs) -> float:
    """How much longer than its work the busiest rank takes; all ranks have the same work."""
    found = hold(order, costs)
    return longest(found) - found.busy(0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_of_h1_is_p_minus_1_times_f_plus_i_minus_w(p: int, m: int, times: tuple[int, int, int]):
    forward, inputs, weights = times
    assert idle(h1(p, m), Costs.equal(p, *times)) == (p - 1) * (forward + inputs - weights)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_idle_time_of_h2_is_p_minus_1_times_f_plus_i_minus_2w(p: int, m: int, times: tuple[int, int, int]):
    forward, inputs, weights = times
    assert idle(h2(p, m), Costs.equal(p, *times)) == (p - 1) * (forward + inputs - 2 * weights)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_rank_of_h1_holds_what_the_first_rank_of_1f1b_holds(p: int, m: int):
    assert set(play(h1(p, m), Costs.equal(p)).peaks) == {p} == {max(play(one_f_one_b.order(p, m), Costs.equal(p)).peaks)}


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_the_first_rank_of_h2_holds_2p_minus_1(p: int, m: int):
    assert max(play(h2(p, m), Costs.equal(p)).peaks) == 2 * p - 1


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_2p_has_no_bubble_within_twice_the_memory_from_3p_micro_batches_on(p: int):
    costs = Costs.equal(p)
    found = hold(two_p(p, 3 * p, costs), costs)
    assert longest(found) == found.busy(0)
    assert max(found.peaks) <= 2 * p * costs.held[0]


@pytest.mark.parametrize(("p", "times"), [(4, (30, 29, 20)), (8, (30, 29, 20)), (8, (19, 18, 9)), (8, (11, 11, 8))])
def test_2p_has_about_no_bubble_where_w_needs_less_memory_than_i(p: int, times: tuple[int, int, int]):
    costs = Costs([times[0]] * p, [times[1]] * p, [times[2]] * p, 0.5, [5.0] * p, [2.0] * p)
    found = hold_roughly(two_p(p, 8 * p, costs), costs)
    assert longest(found) <= 1.01 * found.busy(0)
    assert max(found.peaks) <= 2 * p * costs.held[0]


def hold_roughly(order: Order, costs: Costs):
    """The timeline of an order without faults, for costs that are no whole numbers."""
    assert list(order.faults()) == []
    return play(order, costs)


def test_more_room_is_never_worse_and_less_than_p_still_works():
    costs = Costs.equal(4, 3, 3, 2, transfer=1)
    found = [play(within(4, 12, costs, room), costs) for room in (1, 2, 3, 4, 6, 8)]
    times = [longest(timeline) for timeline in found]
    assert times == sorted(times, reverse=True)
    assert [max(timeline.peaks) for timeline in found] == [1, 2, 3, 4, 6, 8]
    assert longest(found[3]) <= longest(play(h1(4, 12), costs))


def test_without_word_of_memory_each_micro_batch_keeps_one_unit_until_w():
    bare = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3)
    assert two_p(3, 9, bare) == two_p(3, 9, Costs.equal(3))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (3, 9), (4, 8), (4, 12), (8, 24)])
def test_h1_is_not_longer_and_holds_no_more_than_the_lists_of_torch(p: int, m: int):
    rounds = max(1, m // p)
    names = {"pp_group_size": p, "n_local_stages": 1, "_n_microbatches": m, "microbatches_per_round": m // rounds}
    made = [ScheduleInterleavedZeroBubble._calculate_single_rank_operations(SimpleNamespace(**names), rank) for rank in range(p)]
    torchs = Order.looped([Slot(*slot) for slot in theirs(actions)] for actions in made)  # type: ignore[arg-type]
    for costs in (Costs.equal(p), Costs.equal(p, 5, 6, 4, transfer=1)):
        ours, other = hold(h1(p, m), costs), play(torchs, costs)
        assert longest(ours) <= longest(other)
        assert ours.end <= other.end
        assert max(ours.peaks) <= max(other.peaks)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **COUNTS)
def test_they_play_to_their_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    costs = data.draw(unlike(ranks))
    for order in (h1(ranks, micros), h2(ranks, micros)):
        hold(order, costs)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), micros=st.integers(1, 9))
def test_2p_plays_to_its_end_within_its_room_and_is_never_longer_than_h1(data: st.DataObject, ranks: int, micros: int):
    costs = data.draw(unlike(ranks))
    found = hold(two_p(ranks, micros, costs), costs)
    assert all(peak <= 2 * ranks * held for peak, held in zip(found.peaks, costs.held, strict=True))
    assert longest(found) <= longest(play(h1(ranks, micros), costs))


@pytest.mark.parametrize("make", [h1, h2])
def test_two_swapped_slots_are_noticed(make: Make):
    right, costs = make(3, 6), Costs.equal(3)
    told = play(right, costs)
    assert all(noticed(swapped(right, rank, 0, 1), costs, told) for rank in range(3))


def test_w_before_its_time_is_noticed():
    right, costs = h2(4, 8), Costs.equal(4)
    told = play(right, costs)
    last = list(right.slots[3])
    eager = [slot for slot in last if slot.kind != "W"]
    for slot in [slot for slot in last if slot.kind == "W"]:
        eager.insert(eager.index(Slot("I", slot.stage, slot.micro)) + 1, slot)
    assert longest(play(with_slots(right, 3, eager), costs)) > longest(told)


def test_no_ranks_and_no_micro_batches_are_refused():
    assert [fault.where for fault in faults(0, 0)] == ["mesh.pp", "micro_batch"]
    with pytest.raises(PlanError, match="needed is at least one"):
        h1(2, 0)
