"""The searched order is never worse than a named one that fits, keeps to the limits,
and is the same again.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import automatic as search_module
from meshwright.parallel.pipeline.schedules.automatic import check_search, named_schedules, search_schedule
from meshwright.parallel.pipeline.schedules.list_scheduler import fits_memory, longest_rank_time
from meshwright.parallel.pipeline.schedules.schedule import (
    PassKind,
    Schedule,
    ScheduleDeadlock,
    ScheduleTimeline,
    StageCosts,
    simulate,
)
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike


def best_named(
    ranks: int, micros: int, costs: StageCosts, limits: list[float], measure=longest_rank_time
) -> float:
    """The least of the named orders that fit; infinite if none does."""
    timed = [simulate(order, costs) for _, order in named_schedules(ranks, micros, len(costs.forward))]
    return min((measure(found) for found in timed if fits_memory(found, limits)), default=float("inf"))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 3), micros=st.integers(1, 7))
def test_it_is_never_worse_than_the_best_named_order_that_fits(
    data: st.DataObject, ranks: int, chunks: int, micros: int
):
    costs = data.draw(unlike(ranks * chunks))
    least = [sum(costs.activation_memory[rank::ranks]) for rank in range(ranks)]
    limits = [each * data.draw(st.integers(1, 5)) for each in least]
    measure = data.draw(st.sampled_from([longest_rank_time, lambda timeline: timeline.end]))
    found = search_schedule(ranks, micros, costs, limits, measure=measure, num_trials=10)
    hold(found.schedule, costs)
    assert fits_memory(found, limits)
    assert measure(found) <= best_named(ranks, micros, costs, limits, measure)


def test_a_heavy_last_part_and_a_slow_link_are_better_served_than_by_any_name():
    costs = StageCosts([4, 4, 4, 6], [4, 4, 4, 6], [3, 3, 3, 5], 2, [1] * 4, [1] * 4)
    limits = [6.0] * 4
    found = search_schedule(4, 16, costs, limits)
    assert longest_rank_time(found) < 0.97 * best_named(4, 16, costs, limits)


@pytest.mark.parametrize("seed", range(6))
def test_on_two_ranks_with_few_micro_batches_it_is_the_least_of_all_orders(seed: int):
    random = Random(seed)
    micros = 2 + seed % 2
    times = [[random.randint(1, 6) for _ in range(2)] for _ in range(3)]
    costs = StageCosts(
        *times, transfer=random.randint(0, 2), activation_memory=[1, 1], weight_grad_memory=[1, 1]
    )  # type: ignore[arg-type]
    limits = [float(random.randint(1, 3)) for _ in range(2)]
    least = float("inf")
    for lists in product(list(rank_lists(micros)), repeat=2):
        order = Schedule.with_looped_placement(
            [(kind, rank, micro) for kind, micro in acts] for rank, acts in enumerate(lists)
        )
        with suppress(ScheduleDeadlock):
            found = simulate(order, costs)
            least = min(least, longest_rank_time(found) if fits_memory(found, limits) else least)
    assert longest_rank_time(search_schedule(2, micros, costs, limits)) == least


def rank_lists(
    micros: int, forwards: int = 0, inputs: int = 0, weights: int = 0
) -> Iterator[list[tuple[PassKind, int]]]:
    """All lists of a rank with one stage, microbatches in their order."""
    if weights == micros:
        yield []
    if forwards < micros:
        yield from ([("F", forwards), *rest] for rest in rank_lists(micros, forwards + 1, inputs, weights))
    if inputs < forwards:
        yield from ([("I", inputs), *rest] for rest in rank_lists(micros, forwards, inputs + 1, weights))
    if weights < inputs:
        yield from ([("W", weights), *rest] for rest in rank_lists(micros, forwards, inputs, weights + 1))


def test_with_equal_parts_and_room_for_2p_nobody_waits():
    costs = StageCosts.uniform(4)
    found = search_schedule(4, 12, costs, [8.0] * 4)
    assert longest_rank_time(found) == found.busy_time(0)


def test_two_parts_per_rank_are_folded_where_that_is_better():
    found = search_schedule(3, 9, StageCosts.uniform(6), [6.0] * 3)
    assert found.schedule.virtual_stages[3].pp_rank == 2
    assert longest_rank_time(found) == found.busy_time(0)


def test_the_smallest_limits_take_one_micro_batch_at_a_time():
    costs = StageCosts([1, 2, 3], [2, 1, 2], [1, 1, 1], 1, [2, 3, 4], [1, 1, 1])
    found = search_schedule(3, 4, costs, [2.0, 3.0, 4.0], num_trials=20)
    assert list(found.peak_memory) == [2, 3, 4]


def test_it_finds_the_same_order_again():
    costs = StageCosts([3, 5, 2], [4, 4, 3], [2, 3, 1], 1, [1] * 3, [1] * 3)
    assert (
        search_schedule(3, 7, costs, [4.0] * 3, num_trials=50).schedule
        == search_schedule(3, 7, costs, [4.0] * 3, num_trials=50).schedule
    )


def test_trials_only_make_it_better():
    costs = StageCosts([3, 5, 2, 7], [4, 4, 3, 7], [2, 3, 1, 6], 2, [1] * 4, [1] * 4)
    times = [
        longest_rank_time(search_schedule(4, 10, costs, [4.0] * 4, num_trials=trials))
        for trials in (0, 50, 300)
    ]
    assert times == sorted(times, reverse=True)


def test_an_improvement_that_keeps_longer_lists_is_noticed(monkeypatch: pytest.MonkeyPatch):
    costs = StageCosts([3, 5, 2, 7], [4, 4, 3, 7], [2, 3, 1, 6], 2, [1] * 4, [1] * 4)
    bar = best_named(4, 6, costs, [8.0] * 4)

    def worst(best: ScheduleTimeline, *_: object) -> ScheduleTimeline:
        return max((simulate(order, costs) for _, order in named_schedules(4, 6, 4)), key=longest_rank_time)

    monkeypatch.setattr(search_module, "_improve", worst)
    assert longest_rank_time(search_module.search_schedule(4, 6, costs, [8.0] * 4)) > bar


def test_limits_below_one_micro_batch_are_refused_with_the_smallest_that_work():
    costs = StageCosts([1] * 4, [1] * 4, [1] * 4, 0, [2, 3, 4, 5], [1] * 4)
    with pytest.raises(PlanError) as caught:
        search_schedule(4, 8, costs, [2.0, 2.5, 8.0, 8.0])
    (fault,) = caught.value.diagnostics
    assert fault.problem == "rank 1 may hold 2.5, and one microbatch of its stages holds 3"
    assert fault.fix == "the smallest limits that work are 2, 3, 4, 5; or cut the model elsewhere"


def test_folded_limits_are_taken_where_distributed_ones_do_not_fit():
    costs = StageCosts(
        [1] * 4, [1] * 4, [1] * 4, 0, [4, 1, 3, 1], [1] * 4
    )  # dealt out: 7 and 2; folded: 5 and 4
    assert [
        stage.pp_rank
        for stage in search_schedule(2, 4, costs, [5.0, 4.0], num_trials=0).schedule.virtual_stages
    ] == [
        0,
        1,
        1,
        0,
    ]


@pytest.mark.parametrize(
    ("ranks", "parts", "limits", "what"),
    [
        (3, 4, (), "costs of 4 stages on 3 ranks"),
        (2, 2, (1.0,), "1 limits for 2 ranks"),
        (0, 2, (), "0 ranks; needed is at least one"),
    ],
)
def test_counts_that_do_not_go_together_are_refused(
    ranks: int, parts: int, limits: tuple[float, ...], what: str
):
    assert what in next(check_search(ranks, 4, StageCosts.uniform(parts), limits)).problem
