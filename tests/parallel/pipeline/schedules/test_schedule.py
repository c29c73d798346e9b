"""Orders as lists: what is missing or stands twice, where ranks wait for ever, when slots start and what is held."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import gpipe, one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, Slot, Stage, Stuck, held, numbers, play
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, with_slots


def listed(*rows: str, chunks: int = 1) -> Order:
    """An order from cells such as 1F0, a row per rank."""
    cells = [[(cell[1], int(cell[0]), int(cell[2])) for cell in row.split()] for row in rows]
    return Order.looped(cells, chunks)


def test_a_slot_twice_on_the_wrong_rank_or_of_no_stage_is_a_fault():
    order = listed("0F0 0B0 0B0 1F0 5F0", "1F0 1B0")
    assert list(order.faults()) == [
        "rank 0 does B0 of stage 0 2 times",
        "rank 0 does F0 of stage 1, which lies on rank 1",
        "rank 0 does F0 of stage 5, and there are 2 stages",
        "micro-batch 0 has FFB in part 1: needed is one F, and one B or one I and one W",
    ]


def test_what_is_missing_is_said_once_for_alike_micro_batches():
    order = listed("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1I1 1F2 1F3")
    assert list(order.faults()) == [
        "micro-batch 1 has FI in part 1: needed is one F, and one B or one I and one W",
        "micro-batches 2, 3 have F in part 1: needed is one F, and one B or one I and one W",
    ]


def test_micro_batches_are_numbered_without_gaps():
    order = listed("0F0 0B0 0F1 0B1 0F5 0B5")
    assert list(order.faults()) == ["the micro-batches are 0, 1, 5: needed are 0 .. 2, each number once"]
    assert numbers([0, 1, 2, 5, 7, 8]) == "0 .. 2, 5, 7, 8"


def test_two_ranks_may_run_a_part_but_not_for_one_micro_batch():
    stages = (Stage(0, 0), Stage(1, 0))
    both = Order(stages, ((Slot("F", 0, 0), Slot("B", 0, 0)), (Slot("F", 1, 1), Slot("B", 1, 1))))
    assert list(both.faults()) == []
    assert (both.parts, both.ranks, both.micros) == (1, 2, 2)
    torn = Order(stages, ((Slot("F", 0, 0),), (Slot("B", 1, 0),)))
    assert list(torn.faults()) == ["micro-batch 0 is split in part 0, over the stages 0, 1"]


def test_the_arrow_stands_at_the_rank_that_waits_for_what_it_does_itself():
    with pytest.raises(Stuck) as stuck:
        play(listed("0F0 0B0", "1F0 1B0", "2B0 2F0"), Costs.equal(3))
    assert str(stuck.value).splitlines() == [
        "nobody can go on:",
        "  rank 0: slot 1 of 2, B0 of stage 0, waits for B0 of part 1",
        "  rank 1: slot 1 of 2, B0 of stage 1, waits for B0 of part 2",
        "  rank 2: slot 0 of 2, B0 of stage 2, waits for F0 of part 2  <-- waits for ever: it does that itself, later, in slot 1",
    ]
    assert (stuck.value.rank, stuck.value.at) == (2, 0)


def test_the_arrow_stands_at_the_first_of_a_circle():
    with pytest.raises(Stuck) as stuck:
        play(listed("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"), Costs.equal(3))
    assert [line for line in str(stuck.value).splitlines() if "<--" in line] == [
        "  rank 0: slot 1 of 4, B0 of stage 0, waits for B0 of part 1  <-- waits for ever: rank 0 for rank 1 for rank 0"
    ]


def test_the_arrow_stands_where_nobody_will_do_what_is_waited_for():
    with pytest.raises(Stuck) as stuck:
        play(listed("0F0 0B0", "1F0 1B0 1F1", "2F0 2B0"), Costs.equal(3))
    assert stuck.value.rank == 1
    assert "  rank 0: finished" in str(stuck.value)
    assert "waits for F1 of part 0  <-- waits for ever: nobody does it" in str(stuck.value)


@settings(deadline=None)
@given(data=st.data(), **COUNTS)
def test_the_arrow_never_stands_at_a_rank_that_merely_waits(data: st.DataObject, ranks: int, micros: int):
    order = one_f_one_b.order(ranks, micros)
    rank = data.draw(st.integers(0, ranks - 1))
    mixed = with_slots(order, rank, data.draw(st.permutations(order.slots[rank])))
    assert list(mixed.faults()) == []
    stuck = standstill(mixed)
    if stuck is not None:
        assert str(stuck).count("<--") == 1
        circle = f"rank {rank} for" in str(stuck) and "it does that itself" not in str(stuck)
        assert stuck.rank == rank or circle


def standstill(order: Order) -> Stuck | None:
    try:
        play(order, Costs.equal(order.parts))
    except Stuck as stuck:
        return stuck
    return None


def test_transfers_lie_between_ranks_and_not_between_parts_of_one_rank():
    two = listed("0F0 0B0", "1F0 1B0")
    found = play(two, Costs.equal(2, transfer=0.5))
    assert found.spans == (((0.0, 1.0), (5.0, 7.0)), ((1.5, 2.5), (2.5, 4.5)))
    (first, last), inner = two.slots
    one = Order((Stage(0, 0), Stage(0, 1)), ((first, *inner, last),))
    assert play(one, Costs.equal(2, transfer=0.5)).end == 6.0


def test_a_gradient_travels_when_its_half_is_done_and_memory_stays_until_the_other_is():
    order = listed("0F0 0I0 0W0", "1F0 1I0 1W0")
    costs = Costs([1, 1], [1, 1], [1, 1], held=[3, 3], late=[2, 1])
    found = play(order, costs)
    assert found.spans[0] == ((0, 1), (3, 4), (4, 5))
    assert found.bubble == pytest.approx(4 / 10)
    assert held(order, costs, 0) == [(3, 3), (3, 2), (2, 0)]
    assert held(order, costs, 1) == [(3, 3), (3, 1), (1, 0)]
    assert found.peaks == (3, 3)


def test_an_order_of_nothing_takes_no_time():
    order = Order((), ())
    assert (list(order.faults()), order.parts, order.micros) == ([], 0, 0)
    assert play(order, Costs.equal(0)).end == 0.0


def test_the_result_does_not_depend_on_the_order_in_which_ranks_are_played():
    order = gpipe.order(4, 6)
    costs = Costs([3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], 2)
    turned = Order(tuple(Stage(3 - rank, part) for rank, part in order.stages), order.slots[::-1])
    assert play(turned, costs).spans == play(order, costs).spans[::-1]
