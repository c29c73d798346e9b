"""A played schedule as spans: a wait for a message is told from a bubble, and memory follows the slots."""

from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, schedule_spans, simulate
from meshwright.plan.step.simulator import TimelineSpan


def rows(order: Schedule, costs: StageCosts) -> list[list[TimelineSpan]]:
    return schedule_spans(simulate(order, costs), costs)


def test_a_wait_for_a_message_is_a_span_and_a_bubble_is_none():
    found = rows(one_f_one_b.one_f_one_b_schedule(2, 1), StageCosts.uniform(2, transfer=1.0))
    assert [(span.kind, span.begin, span.end) for span in found[0]] == [("F", 0, 1), ("~", 5, 6), ("B", 6, 8)]
    assert [(span.kind, span.begin, span.end) for span in found[1]] == [("~", 1, 2), ("F", 2, 3), ("B", 3, 5)]


def test_a_message_that_came_while_the_rank_worked_is_no_wait():
    found = rows(one_f_one_b.one_f_one_b_schedule(2, 6), StageCosts.uniform(2, forward=3, transfer=1.0))
    late = [span for span in found[1] if span.kind == "~"]
    assert all(span.end - span.begin <= 1 for span in late)
    assert len(late) < 6


def test_parts_of_a_rank_are_counted_and_what_it_holds_follows_its_slots():
    found = rows(interleaved.interleaved_schedule(2, 2, 2), StageCosts.uniform(4))
    assert [span.label for span in found[0][:4]] == ["F0", "F1", "f0", "f1"]
    assert [span.memory for span in found[0][:4]] == [1, 2, 3, 4]
    assert [span.memory_after for span in found[0]][-1] == 0


def test_without_known_memory_nothing_is_held():
    assert {
        span.memory
        for row in rows(one_f_one_b.one_f_one_b_schedule(2, 3), StageCosts([1, 1], [1, 1], [1, 1]))
        for span in row
    } == {0.0}
