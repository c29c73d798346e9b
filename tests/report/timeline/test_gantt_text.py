"""A schedule as text: actions at their times, bubbles as dots, waits for messages, memory below."""

from io import StringIO

import pytest
from rich.console import Console

from meshwright.parallel.pipeline.schedules import interleaved, one_f_one_b
from meshwright.parallel.pipeline.schedules.schedule import Schedule, StageCosts, schedule_spans, simulate
from meshwright.plan.step.simulator import TimelineSpan
from meshwright.report.timeline.gantt_text import gantt_view, schedule_summary


def lines(parts: dict, width: int = 120) -> list[str]:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(gantt_view(parts, width))
    return [line.rstrip() for line in console.export_text().splitlines()]


def rows(order: Schedule, costs: StageCosts) -> list[list[TimelineSpan]]:
    return schedule_spans(simulate(order, costs), costs)


def test_a_cell_is_a_unit_dots_are_bubbles_and_memory_stands_below():
    drawn = lines({"planned": rows(one_f_one_b.one_f_one_b_schedule(2, 2), StageCosts.uniform(2))})
    half, whole = "\u2584", "\u2588"
    assert drawn == [
        "planned: 9 long, bubble 33.33 %, peak memory 2",
        "rank 0   F0 F1 ......B0--- ...B1---",
        "rank 1   ...F0 B0--- F1 B1--- ......",
        f"mem  0   {half * 3}{whole * 15}{half * 9} 2",
        f"mem  1      {half * 18}       1",
        "",
        " F  forward    B  backward    .  bubble",
    ]


def test_later_virtual_stages_are_in_lower_case_and_halves_have_their_own_letters():
    drawn = "\n".join(
        lines({"planned": rows(interleaved.interleaved_schedule(2, 2, 2), StageCosts.uniform(4))}, 150)
    )
    assert "rank 0   F0 F1 f0 f1" in drawn
    split = Schedule.with_looped_placement([[("F", 0, 0), ("I", 0, 0), ("W", 0, 0)]])
    drawn = lines({"planned": rows(split, StageCosts.uniform(1))})
    assert drawn[1] == "rank 0   F0 I0 W0"
    assert " ".join(drawn[-1].split()) == "F forward I input gradients W weight gradients . bubble"


def test_a_wait_for_a_message_is_told_from_a_bubble():
    found = rows(one_f_one_b.one_f_one_b_schedule(2, 1), StageCosts.uniform(2, transfer=1.0))
    drawn = lines({"planned": found})
    assert drawn[1] == "rank 0   F0 ............~~~B0---"
    assert "~  exposed communication" in drawn[-1]


def test_planned_and_measured_stand_on_one_scale():
    order = one_f_one_b.one_f_one_b_schedule(2, 3)
    fast, slow = StageCosts.uniform(2), StageCosts.uniform(2, 2, 2, 2)
    drawn = lines({"planned": rows(order, fast), "measured": rows(order, slow)}, 200)
    ranks = [line for line in drawn if line.startswith("rank 0")]
    assert len(ranks[0]) == len(ranks[1]) + 1, (
        "both fill the same width, the shorter with dots; an act ends with a space"
    )
    assert ranks[0].count(".") > ranks[1].count(".")
    assert [line for line in drawn if ":" in line][1].startswith("measured: 24 long")


def test_what_is_too_long_for_its_label_is_drawn_to_scale():
    order = one_f_one_b.one_f_one_b_schedule(4, 40)
    drawn = lines({"planned": rows(order, StageCosts.uniform(4))}, 80)
    assert max(map(len, drawn)) <= 90
    (first, *_) = [line for line in drawn if line.startswith("rank 0")]
    assert first.count(".") == pytest.approx(71 * 3 / 43, abs=3)


def test_memory_is_drawn_only_where_something_is_known_of_it():
    order = one_f_one_b.one_f_one_b_schedule(2, 2)
    known = rows(order, StageCosts.uniform(2))
    unknown = rows(order, StageCosts([1, 1], [1, 1], [1, 1]))
    assert any(line.startswith("mem") for line in lines({"planned": known}))
    assert not any(line.startswith("mem") for line in lines({"planned": unknown}))
    assert known[0][-1].memory_after == 0.0


def test_nothing_is_drawn_of_nothing():
    assert schedule_summary([[]]) == "0 long, bubble 0.00 %"
    assert lines({"planned": [[]]})[1] == "rank 0"
