"""The searched order is never worse than a named one that fits, keeps to the limits, and is the same again."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules import search as search_module
from meshwright.parallel.pipeline.schedules.list_scheduler import fits, longest
from meshwright.parallel.pipeline.schedules.schedule import Costs, Kind, Order, Stuck, Timeline, play
from meshwright.parallel.pipeline.schedules.search import faults, named, search
from meshwright.plan.job.errors import PlanError
from tests.parallel.pipeline.schedules.schedule_laws import hold, unlike


def best_named(ranks: int, micros: int, costs: Costs, limits: list[float], measure=longest) -> float:
    """The least of the named orders that fit; infinite if none does."""
    timed = [play(order, costs) for _, order in named(ranks, micros, len(costs.forward))]
    return min((measure(found) for found in timed if fits(found, limits)), default=float("inf"))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), chunks=st.integers(1, 3), micros=st.integers(1, 7))
def test_it_is_never_worse_than_the_best_named_order_that_fits(data: st.DataObject, ranks: int, chunks: int, micros: int):
    costs = data.draw(unlike(ranks * chunks))
    least = [sum(costs.held[rank::ranks]) for rank in range(ranks)]
    limits = [each * data.draw(st.integers(1, 5)) for each in least]
    measure = data.draw(st.sampled_from([longest, lambda timeline: timeline.end]))
    found = search(ranks, micros, costs, limits, measure=measure, trials=10)
    hold(found.order, costs)
    assert fits(found, limits)
    assert measure(found) <= best_named(ranks, micros, costs, limits, measure)


def test_a_heavy_last_part_and_a_slow_link_are_better_served_than_by_any_name():
    costs = Costs([4, 4, 4, 6], [4, 4, 4, 6], [3, 3, 3, 5], 2, [1] * 4, [1] * 4)
    limits = [6.0] * 4
    found = search(4, 16, costs, limits)
    assert longest(found) < 0.97 * best_named(4, 16, costs, limits)


@pytest.mark.parametrize("seed", range(6))
def test_on_two_ranks_with_few_micro_batches_it_is_the_least_of_all_orders(seed: int):
    random = Random(seed)
    micros = 2 + seed % 2
    times = [[random.randint(1, 6) for _ in range(2)] for _ in range(3)]
    costs = Costs(*times, transfer=random.randint(0, 2), held=[1, 1], late=[1, 1])  # type: ignore[arg-type]
    limits = [float(random.randint(1, 3)) for _ in range(2)]
    least = float("inf")
    for lists in product(list(rank_lists(micros)), repeat=2):
        order = Order.looped([(kind, rank, micro) for kind, micro in acts] for rank, acts in enumerate(lists))
        with suppress(Stuck):
            found = play(order, costs)
            least = min(least, longest(found) if fits(found, limits) else least)
    assert longest(search(2, micros, costs, limits)) == least


def rank_lists(micros: int, forwards: int = 0, inputs: int = 0, weights: int = 0) -> Iterator[list[tuple[Kind, int]]]:
    """All lists of a rank with one part, micro-batches in their order."""
    if weights == micros:
        yield []
    if forwards < micros:
        yield from ([("F", forwards), *rest] for rest in rank_lists(micros, forwards + 1, inputs, weights))
    if inputs < forwards:
        yield from ([("I", inputs), *rest] for rest in rank_lists(micros, forwards, inputs + 1, weights))
    if weights < inputs:
        yield from ([("W", weights), *rest] for rest in rank_lists(micros, forwards, inputs, weights + 1))


def test_with_equal_parts_and_room_for_2p_nobody_waits():
    costs = Costs.equal(4)
    found = search(4, 12, costs, [8.0] * 4)
    assert longest(found) == found.busy(0)


def test_two_parts_per_rank_are_folded_where_that_is_better():
    found = search(3, 9, Costs.equal(6), [6.0] * 3)
    assert found.order.stages[3].rank == 2
    assert longest(found) == found.busy(0)


def test_the_smallest_limits_take_one_micro_batch_at_a_time():
    costs = Costs([1, 2, 3], [2, 1, 2], [1, 1, 1], 1, [2, 3, 4], [1, 1, 1])
    found = search(3, 4, costs, [2.0, 3.0, 4.0], trials=20)
    assert list(found.peaks) == [2, 3, 4]


def test_it_finds_the_same_order_again():
    costs = Costs([3, 5, 2], [4, 4, 3], [2, 3, 1], 1, [1] * 3, [1] * 3)
    assert search(3, 7, costs, [4.0] * 3, trials=50).order == search(3, 7, costs, [4.0] * 3, trials=50).order


def test_trials_only_make_it_better():
    costs = Costs([3, 5, 2, 7], [4, 4, 3, 7], [2, 3, 1, 6], 2, [1] * 4, [1] * 4)
    times = [longest(search(4, 10, costs, [4.0] * 4, trials=trials)) for trials in (0, 50, 300)]
    assert times == sorted(times, reverse=True)


def test_an_improvement_that_keeps_longer_lists_is_noticed(monkeypatch: pytest.MonkeyPatch):
    costs = Costs([3, 5, 2, 7], [4, 4, 3, 7], [2, 3, 1, 6], 2, [1] * 4, [1] * 4)
    bar = best_named(4, 6, costs, [8.0] * 4)

    def worst(best: Timeline, *_: object) -> Timeline:
        return max((play(order, costs) for _, order in named(4, 6, 4)), key=longest)

    monkeypatch.setattr(search_module, "_improved", worst)
    assert longest(search_module.search(4, 6, costs, [8.0] * 4)) > bar


def test_limits_below_one_micro_batch_are_refused_with_the_smallest_that_work():
    costs = Costs([1] * 4, [1] * 4, [1] * 4, 0, [2, 3, 4, 5], [1] * 4)
    with pytest.raises(PlanError) as caught:
        search(4, 8, costs, [2.0, 2.5, 8.0, 8.0])
    (fault,) = caught.value.faults
    assert fault.what == "rank 1 may hold 2.5, and one micro-batch of its parts holds 3"
    assert fault.fix == "the smallest limits that work are 2, 3, 4, 5; or cut the model elsewhere"


def test_folded_limits_are_taken_where_dealt_out_ones_do_not_fit():
    costs = Costs([1] * 4, [1] * 4, [1] * 4, 0, [4, 1, 3, 1], [1] * 4)  # dealt out: 7 and 2; folded: 5 and 4
    assert [stage.rank for stage in search(2, 4, costs, [5.0, 4.0], trials=0).order.stages] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("ranks", "parts", "limits", "what"),
    [
        (3, 4, (), "costs of 4 parts on 3 ranks"),
        (2, 2, (1.0,), "1 limits for 2 ranks"),
        (0, 2, (), "0 ranks; needed is at least one"),
    ],
)
def test_counts_that_do_not_go_together_are_refused(ranks: int, parts: int, limits: tuple[float, ...], what: str):
    assert what in next(faults(ranks, 4, Costs.equal(parts), limits)).what
