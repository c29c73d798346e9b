"""DualPipe and DualPipeV against their closed forms, torch's lists, and on unlike stages; any number of
microbatches.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from meshwright.parallel.pipeline.schedules.dualpipe import (
    check_dualpipe,
    dualpipe_schedule,
    dualpipev_schedule,
)
from meshwright.parallel.pipeline.schedules.list_scheduler import longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import Schedule, ScheduleAction, StageCosts, simulate
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import COUNTS, hold, noticed, swapped, unlike

TIMES = [(1, 1, 1), (2, 2, 1), (3, 2, 1), (4, 4, 3), (5, 4, 2)]  # F, I, W with W <= I <= F <= I + W


def idle(order: Schedule, costs: StageCosts) -> float:
    """Returns how much longer than its work the busiest rank takes; all ranks have the same work."""
    found = hold(order, costs)
    return longest_rank_time(found) - found.busy_time(0)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 8), (4, 8), (4, 18), (6, 24), (8, 40)])
def test_idle_time_of_dualpipe_is_half_of_p_minus_1_times_f_plus_i_minus_w(
    p: int, m: int, times: tuple[int, int, int]
):
    forward, inputs, weights = times
    assert idle(dualpipe_schedule(p, m), StageCosts.uniform(p, *times)) == (p // 2 - 1) * (
        forward + inputs - weights
    )


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 9), (4, 12), (5, 10), (8, 24)])
def test_idle_time_of_dualpipev_is_p_minus_1_times_that_of_a_part(
    p: int, m: int, times: tuple[int, int, int]
):
    forward, inputs, weights = times
    assert idle(dualpipev_schedule(p, m), StageCosts.uniform(2 * p, *times)) == (p - 1) * (
        forward + inputs - weights
    )


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (2, 3, 1), (4, 5, 3)])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (6, 24), (8, 32)])
def test_with_pairs_as_one_act_idle_time_is_that_of_the_paper(p: int, m: int, times: tuple[int, int, int]):
    forward, inputs, weights = times
    pair = forward + inputs + weights
    waits = idle_of_pairs(dualpipe_schedule(p, m), StageCosts.uniform(p, *times))
    assert max(waits) == (p // 2 - 1) * (pair + inputs + weights - 3 * weights)


def idle_of_pairs(order: Schedule, costs: StageCosts) -> list[float]:
    """Returns how long each rank waits between its first act and its last, where a forward and the backward
    behind it are one act.
    """
    acts = [list(paired(slots)) for slots in order.actions]
    at, free, first, work = ([0.0] * order.num_ranks for _ in range(4))
    done: dict[object, float] = {}
    began = set()
    while any(at[rank] < len(acts[rank]) for rank in range(order.num_ranks)):
        for rank in range(order.num_ranks):
            while at[rank] < len(acts[rank]):
                act = acts[rank][int(at[rank])]
                needs = [need for slot in act for need in order.dependencies_of(slot)]
                if any(need not in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                took = sum(costs.seconds(slot.kind, 0) for slot in act)
                if rank not in began:
                    first[rank] = start
                    began.add(rank)
                free[rank], at[rank], work[rank] = start + took, at[rank] + 1, work[rank] + took
                done.update((order.output_of(slot), free[rank]) for slot in act)
    return [end - start - each for end, start, each in zip(free, first, work, strict=True)]


def paired(slots: tuple[ScheduleAction, ...]):
    """The slots, with each B that stands behind an F of another microbatch in one act with it."""
    at = 0
    while at < len(slots):
        two = slots[at : at + 2]
        pair = (
            len(two) == 2
            and (two[0].kind, two[1].kind) == ("F", "B")
            and two[0].microbatch != two[1].microbatch
        )
        yield two if pair else two[:1]
        at += 1 + pair


@pytest.mark.parametrize("p", [2, 4, 6, 8])
def test_every_rank_of_dualpipe_holds_p_plus_1(p: int):
    assert set(hold(dualpipe_schedule(p, 3 * p), StageCosts.uniform(p)).peak_memory) == {p + 1}


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_every_rank_of_dualpipev_holds_2p_plus_1_halves(p: int):
    assert set(hold(dualpipev_schedule(p, 3 * p), StageCosts.uniform(2 * p)).peak_memory) == {2 * p + 1}


def test_both_directions_have_a_copy_of_every_part():
    order = dualpipe_schedule(4, 9)
    assert [tuple(stage) for stage in order.virtual_stages] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
        (0, 3),
        (1, 2),
        (2, 1),
        (3, 0),
    ]
    up = {slot.microbatch for slots in order.actions for slot in slots if slot.virtual_stage < 4}
    down = {slot.microbatch for slots in order.actions for slot in slots if slot.virtual_stage >= 4}
    assert (sorted(up), sorted(down)) == ([0, 1, 2, 3, 4], [5, 6, 7, 8])


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 7), (3, 9), (4, 8), (4, 12)])
def test_the_lists_of_dualpipev_are_those_of_torch(p: int, m: int):
    names = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
    made = [ScheduleDualPipeV._calculate_single_rank_operations(names, rank) for rank in range(p)]
    assert [flat(actions) for actions in made] == [list(slots) for slots in dualpipev_schedule(p, m).actions]


def flat(actions: list) -> list[tuple[str, int, int]]:
    """A rank's list as torch writes it, with both acts of a pair, one behind the other."""
    single = [sub for action in actions for sub in (action.sub_actions or (action,))]
    return [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in single]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), **COUNTS)
def test_they_play_to_their_end_whatever_parts_cost(data: st.DataObject, ranks: int, micros: int):
    hold(dualpipev_schedule(ranks, micros), data.draw(unlike(2 * ranks)))
    if ranks % 2 == 0:
        hold(dualpipe_schedule(ranks, micros), data.draw(unlike(ranks)))


@pytest.mark.parametrize(("order", "parts"), [(dualpipe_schedule(4, 12), 4), (dualpipev_schedule(3, 9), 6)])
def test_two_swapped_slots_are_noticed(order: Schedule, parts: int):
    costs = StageCosts.uniform(parts)
    told = simulate(order, costs)
    assert all(noticed(swapped(order, rank, 0, 1), costs, told) for rank in range(order.num_ranks))


def test_an_odd_number_of_ranks_is_refused_with_the_nearest_that_work():
    (fault,) = check_dualpipe(5, 8)
    assert fault.problem == "5 ranks; DualPipe needs an even number of ranks"
    assert fault.fix == "use 4 or 6 ranks, or dualpipev, which takes any number"
    with pytest.raises(PlanError, match="use 2 ranks, or dualpipev"):
        dualpipe_schedule(1, 4)
