"""Laws of every schedule: it is whole, plays to its end, is no faster than its busiest rank, and a swap
is noticed.
"""

from itertools import pairwise

from hypothesis import strategies as st

from meshwright.parallel.pipeline.schedules.schedule import (
    Schedule,
    ScheduleAction,
    ScheduleDeadlock,
    ScheduleTimeline,
    StageCosts,
    simulate,
)

COUNTS = {"ranks": st.integers(1, 7), "micros": st.integers(1, 17)}


@st.composite
def unlike(draw: st.DrawFn, parts: int) -> StageCosts:
    """Costs of stages of which no two need be alike, in whole units, so that sums are exact."""
    times = st.lists(st.integers(1, 9), min_size=parts, max_size=parts)
    held = draw(times)
    return StageCosts(
        draw(times),
        draw(times),
        draw(times),
        draw(st.integers(0, 4)),
        held,
        [draw(st.integers(0, h)) for h in held],
    )


def hold(order: Schedule, costs: StageCosts) -> ScheduleTimeline:
    """The timeline of `order`, after all that holds for any order was looked at."""
    assert list(order.errors()) == []
    found = simulate(order, costs)
    needs_are_met(found, costs)
    most = 0.0
    for rank, (slots, spans) in enumerate(zip(order.actions, found.spans, strict=True)):
        assert len(slots) == len(spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "one act at a time"
        work = sum(costs.seconds(slot.kind, order.virtual_stages[slot.virtual_stage].stage) for slot in slots)
        assert found.busy_time(rank) == work
        most = max(most, work)
    assert found.end >= most
    assert 0.0 <= found.bubble < 1.0
    return found


def needs_are_met(found: ScheduleTimeline, costs: StageCosts) -> None:
    """Nothing starts before what it needs has ended, and come."""
    order = found.schedule
    ended = {
        order.output_of(slot): (end, rank)
        for rank, (slots, spans) in enumerate(zip(order.actions, found.spans, strict=True))
        for slot, (_, end) in zip(slots, spans, strict=True)
    }
    for rank, (slots, spans) in enumerate(zip(order.actions, found.spans, strict=True)):
        for slot, (start, _) in zip(slots, spans, strict=True):
            for end, at in (ended[need] for need in order.dependencies_of(slot)):
                assert start >= end + (costs.transfer if at != rank else 0)


def swapped(order: Schedule, rank: int, one: int, other: int) -> Schedule:
    """`order` with two slots of a rank in each other's place: a planted bug."""
    slots = list(order.actions[rank])
    slots[one], slots[other] = slots[other], slots[one]
    return with_slots(order, rank, slots)


def with_slots(order: Schedule, rank: int, slots: list[ScheduleAction]) -> Schedule:
    """`order` with other slots on a rank."""
    lists = [tuple(slots) if at == rank else each for at, each in enumerate(order.actions)]
    return Schedule(order.virtual_stages, tuple(lists))


def noticed(order: Schedule, costs: StageCosts, right: ScheduleTimeline) -> bool:
    """Whether `order` is told from the `right` one: it gets stuck, takes longer or holds more."""
    try:
        found = simulate(order, costs)
    except ScheduleDeadlock:
        return True
    return found.end > right.end or max(found.peak_memory) > max(right.peak_memory)


def theirs(pipeline_order: list[object]) -> list[tuple[str, int, int]]:
    """A rank's list as torch writes it, without pauses and what follows from it: (kind, stage,
    microbatch).
    """
    actions = [action for action in pipeline_order if action is not None]
    found = [
        (action.computation_type.value, action.stage_index, action.microbatch_index) for action in actions
    ]
    return [slot for slot in found if slot[0] in "FBIW"]
