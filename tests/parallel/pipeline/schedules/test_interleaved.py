"""Interleaved 1F1B against its closed forms, torch's lists, and on unlike stages;
any number of microbatches.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from meshwright.parallel.pipeline.schedules import one_f_one_b
from meshwright.parallel.pipeline.schedules.interleaved import (
    check_interleaved,
    group_sizes,
    interleaved_schedule,
)
from meshwright.parallel.pipeline.schedules.schedule import StageCosts, simulate
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, theirs, unlike

CASES = [(p, m, v) for p in (2, 3, 4, 7) for m in (*range(1, 10), 14, 21, 30) for v in (1, 2, 3)]


@pytest.mark.parametrize(("p", "m", "v"), CASES)
def test_bubble_is_a_vth_of_that_of_1f1b_for_any_number_of_micro_batches(p: int, m: int, v: int):
    found = hold(
        interleaved_schedule(p, m, v), StageCosts.uniform(p * v, 2, 3, 1)
    )  # times of a chunk: those of a rank are v times these
    short = (v - 1) * max(0, p - m)
    assert found.end == (m * v + p - 1 + short) * 6


@pytest.mark.parametrize(
    ("p", "m", "v"), [(p, n * p, v) for p in (2, 3, 4, 8) for n in (2, 3, 5) for v in (2, 3, 4)]
)
def test_the_first_rank_holds_p_times_1_plus_p_minus_1_of_pv(p: int, m: int, v: int):
    found = hold(
        interleaved_schedule(p, m, v), StageCosts.uniform(p * v)
    )  # a chunk keeps one unit: a vth of what a rank keeps
    assert max(found.peak_memory) == found.peak_memory[0] == p * v + p - 1
    assert found.peak_memory[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 4, 2), (3, 9, 3), (4, 10, 2), (4, 3, 2), (4, 12, 3), (3, 5, 2)]
)
def test_the_lists_are_those_of_torch_where_torch_has_some(p: int, m: int, v: int):
    rounds = max(1, m // p)
    assert m % rounds == 0
    names = {
        "pp_group_size": p,
        "n_local_stages": v,
        "_n_microbatches": m,
        "microbatches_per_round": m // rounds,
    }
    made = [
        ScheduleInterleaved1F1B._calculate_single_rank_operations(SimpleNamespace(**names), rank)
        for rank in range(p)
    ]
    assert [theirs(actions) for actions in made] == [
        list(slots) for slots in interleaved_schedule(p, m, v).actions
    ]


def test_groups_are_even_and_none_is_smaller_than_the_ranks():
    assert group_sizes(4, 12) == [4, 4, 4]
    assert group_sizes(4, 11) == [6, 5]
    assert group_sizes(4, 7) == [7]
    assert group_sizes(4, 3) == [3]


def test_one_chunk_is_1f1b():
    assert interleaved_schedule(4, 7, 1) == one_f_one_b.one_f_one_b_schedule(4, 7)


@settings(deadline=None)
@given(data=st.data(), chunks=st.integers(1, 4), **COUNTS)
def test_it_plays_to_its_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int, chunks: int):
    hold(interleaved_schedule(ranks, micros, chunks), data.draw(unlike(ranks * chunks)))


def test_two_swapped_slots_are_noticed():
    right = interleaved_schedule(2, 4, 2)
    costs = StageCosts.uniform(4)
    assert noticed(swapped(right, 1, 4, 5), costs, simulate(right, costs)), (
        "the second forward of a chunk behind its backward"
    )
    assert noticed(swapped(right, 1, 2, 3), costs, simulate(right, costs)), (
        "a chunk's backward before its forward"
    )


def test_chunks_on_one_rank_are_refused_with_their_repair():
    (fault,) = check_interleaved(1, 4, 3)
    assert fault.problem == "virtual_stages = 3 on one pp rank; interleaving needs at least 2"
    assert "virtual_stages = 1" in fault.fix
    assert [fault.location for fault in check_interleaved(2, 4, 0)] == ["strategies.pipeline.virtual_stages"]
