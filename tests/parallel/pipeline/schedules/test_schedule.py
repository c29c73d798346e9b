"""Orders as lists: what is missing or stands twice, where ranks wait for ever, when slots start and what is
held.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import gpipe, one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import (
    Schedule,
    ScheduleAction,
    ScheduleDeadlock,
    StageCosts,
    VirtualStage,
    format_numbers,
    memory_over_time,
    simulate,
)
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, with_slots


def listed(*rows: str, chunks: int = 1) -> Schedule:
    """An order from cells such as 1F0, a row per rank."""
    cells = [[(cell[1], int(cell[0]), int(cell[2])) for cell in row.split()] for row in rows]
    return Schedule.with_looped_placement(cells, chunks)


def test_a_slot_twice_on_the_wrong_rank_or_of_no_stage_is_a_fault():
    order = listed("0F0 0B0 0B0 1F0 5F0", "1F0 1B0")
    assert list(order.errors()) == [
        "rank 0 does B0 of virtual stage 0 2 times",
        "rank 0 does F0 of virtual stage 1, which is on rank 1",
        "rank 0 does F0 of virtual stage 5, and there are 2 virtual stages",
        "microbatch 0 has FFB in stage 1: needed is one F, and one B or one I and one W",
    ]


def test_what_is_missing_is_said_once_for_alike_micro_batches():
    order = listed("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1I1 1F2 1F3")
    assert list(order.errors()) == [
        "microbatch 1 has FI in stage 1: needed is one F, and one B or one I and one W",
        "microbatches 2, 3 have F in stage 1: needed is one F, and one B or one I and one W",
    ]


def test_micro_batches_are_numbered_without_gaps():
    order = listed("0F0 0B0 0F1 0B1 0F5 0B5")
    assert list(order.errors()) == ["the microbatches are 0, 1, 5: needed are 0 .. 2, each number once"]
    assert format_numbers([0, 1, 2, 5, 7, 8]) == "0 .. 2, 5, 7, 8"


def test_two_ranks_may_run_a_part_but_not_for_one_micro_batch():
    stages = (VirtualStage(0, 0), VirtualStage(1, 0))
    both = Schedule(
        stages,
        (
            (ScheduleAction("F", 0, 0), ScheduleAction("B", 0, 0)),
            (ScheduleAction("F", 1, 1), ScheduleAction("B", 1, 1)),
        ),
    )
    assert list(both.errors()) == []
    assert (both.num_stages, both.num_ranks, both.num_microbatches) == (1, 2, 2)
    torn = Schedule(stages, ((ScheduleAction("F", 0, 0),), (ScheduleAction("B", 1, 0),)))
    assert list(torn.errors()) == ["microbatch 0 is split in stage 0, over the virtual stages 0, 1"]


def test_the_arrow_stands_at_the_rank_that_waits_for_what_it_does_itself():
    with pytest.raises(ScheduleDeadlock) as stuck:
        simulate(listed("0F0 0B0", "1F0 1B0", "2B0 2F0"), StageCosts.uniform(3))
    assert str(stuck.value).splitlines() == [
        "no rank can proceed:",
        "  rank 0: action 1 of 2, B0 of virtual stage 0, waits for B0 of stage 1",
        "  rank 1: action 1 of 2, B0 of virtual stage 1, waits for B0 of stage 2",
        (
            "  rank 2: action 0 of 2, B0 of virtual stage 2, waits for F0 of stage 2  <-- deadlock: this "
            "rank runs it later, as action 1"
        ),
    ]
    assert (stuck.value.rank, stuck.value.action_index) == (2, 0)


def test_the_arrow_stands_at_the_first_of_a_circle():
    with pytest.raises(ScheduleDeadlock) as stuck:
        simulate(listed("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"), StageCosts.uniform(3))
    assert [line for line in str(stuck.value).splitlines() if "<--" in line] == [
        (
            "  rank 0: action 1 of 4, B0 of virtual stage 0, waits for B0 of stage 1  <-- deadlock: "
            "rank 0 waits for rank 1 waits for rank 0"
        )
    ]


def test_the_arrow_stands_where_nobody_will_do_what_is_waited_for():
    with pytest.raises(ScheduleDeadlock) as stuck:
        simulate(listed("0F0 0B0", "1F0 1B0 1F1", "2F0 2B0"), StageCosts.uniform(3))
    assert stuck.value.rank == 1
    assert "  rank 0: finished" in str(stuck.value)
    assert "waits for F1 of stage 0  <-- deadlock: no rank runs it" in str(stuck.value)


@settings(deadline=None)
@given(data=st.data(), **COUNTS)
def test_the_arrow_never_stands_at_a_rank_that_merely_waits(data: st.DataObject, ranks: int, micros: int):
    order = one_f_one_b.one_f_one_b_schedule(ranks, micros)
    rank = data.draw(st.integers(0, ranks - 1))
    mixed = with_slots(order, rank, data.draw(st.permutations(order.actions[rank])))
    assert list(mixed.errors()) == []
    stuck = standstill(mixed)
    if stuck is not None:
        assert str(stuck).count("<--") == 1
        circle = f"rank {rank} waits for" in str(stuck) and "this rank runs it" not in str(stuck)
        assert stuck.rank == rank or circle


def standstill(order: Schedule) -> ScheduleDeadlock | None:
    try:
        simulate(order, StageCosts.uniform(order.num_stages))
    except ScheduleDeadlock as stuck:
        return stuck
    return None


def test_transfers_lie_between_ranks_and_not_between_parts_of_one_rank():
    two = listed("0F0 0B0", "1F0 1B0")
    found = simulate(two, StageCosts.uniform(2, transfer=0.5))
    assert found.spans == (((0.0, 1.0), (5.0, 7.0)), ((1.5, 2.5), (2.5, 4.5)))
    (first, last), inner = two.actions
    one = Schedule((VirtualStage(0, 0), VirtualStage(0, 1)), ((first, *inner, last),))
    assert simulate(one, StageCosts.uniform(2, transfer=0.5)).end == 6.0


def test_a_gradient_travels_when_its_half_is_done_and_memory_stays_until_the_other_is():
    order = listed("0F0 0I0 0W0", "1F0 1I0 1W0")
    costs = StageCosts([1, 1], [1, 1], [1, 1], activation_memory=[3, 3], weight_grad_memory=[2, 1])
    found = simulate(order, costs)
    assert found.spans[0] == ((0, 1), (3, 4), (4, 5))
    assert found.bubble == pytest.approx(4 / 10)
    assert memory_over_time(order, costs, 0) == [(3, 3), (3, 2), (2, 0)]
    assert memory_over_time(order, costs, 1) == [(3, 3), (3, 1), (1, 0)]
    assert found.peak_memory == (3, 3)


def test_an_order_of_nothing_takes_no_time():
    order = Schedule((), ())
    assert (list(order.errors()), order.num_stages, order.num_microbatches) == ([], 0, 0)
    assert simulate(order, StageCosts.uniform(0)).end == 0.0


def test_the_result_does_not_depend_on_the_order_in_which_ranks_are_played():
    order = gpipe.gpipe_schedule(4, 6)
    costs = StageCosts([3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], 2)
    turned = Schedule(
        tuple(VirtualStage(3 - rank, part) for rank, part in order.virtual_stages), order.actions[::-1]
    )
    assert simulate(turned, costs).spans == simulate(order, costs).spans[::-1]
