"""The timeline of a step: planned from the program with measured times, and measured from traces."""

from dataclasses import replace

import pytest

from meshwright.report.timeline.planned_vs_measured_spans import (
    MAX_RANKS_DRAWN,
    event_durations_ms,
    step_timeline,
)
from meshwright.report.timeline.run_folder_reader import read_run_record
from tests.paper_model import FIRST_ROLE
from tests.report.small_runs import train_small_run


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return read_run_record(train_small_run(tmp_path_factory.mktemp("run")))


def test_every_action_is_planned_once_and_measured_once_per_rank(record):
    found = step_timeline(record)
    names = sorted(action.name for action in record.program.actions(FIRST_ROLE))
    assert sorted(bar.name for bar in found.planned) == names
    for rank in range(3):
        mine = [bar.name for bar in found.measured if bar.row.startswith(f"rank {rank} ")]
        assert set(names) <= set(mine)
        assert "data" in mine
        assert "wait REDUCE(0)" in mine
    assert found.step in (2, 3)
    assert found.has_times


def test_measured_bars_begin_at_zero_and_planned_ones_have_measured_lengths(record):
    found = step_timeline(record)
    assert min(bar.begin for bar in found.measured) == 0.0
    known = event_durations_ms(
        [[event for event in trace["traceEvents"] if event["ph"] == "X"] for trace in record.traces.values()]
    )
    assert all(bar.length == pytest.approx(known[bar.name]) for bar in found.planned)


def test_an_action_takes_its_mean_and_a_message_its_minimum():
    def event(name: str, row: int, milliseconds: float) -> dict:
        return {"args": {"action": name}, "tid": row, "dur": 1e3 * milliseconds}

    ranks = [
        [event("B", 1, 2.0), event("REDUCE", 2, 8.0)],
        [event("B", 1, 4.0), event("REDUCE", 3, 5.0), {"args": {}, "dur": 1}],
    ]
    assert event_durations_ms(ranks) == {"B": 3.0, "REDUCE": 5.0}


def test_without_a_trace_the_program_is_drawn_to_the_scale_of_its_operations(record):
    found = step_timeline(replace(record, traces={}))
    assert (found.measured, found.step, found.has_times) == ([], None, False)
    lengths = {bar.name: bar.length for bar in found.planned}
    assert lengths["B(head, 0)"] == pytest.approx(2 * lengths["F(head, 0)"])


def test_without_a_program_what_was_measured_is_drawn(record):
    found = step_timeline(replace(record, program=None))
    assert found.planned == []
    assert found.measured
    assert step_timeline(replace(record, program=None, traces={})) is None


def test_of_many_ranks_some_are_drawn_and_the_others_counted(record):
    many = dict.fromkeys(range(MAX_RANKS_DRAWN + 5), record.traces[0])
    found = step_timeline(replace(record, traces=many))
    assert len({bar.row.split()[1] for bar in found.measured}) == MAX_RANKS_DRAWN
    assert found.num_hidden_ranks == 5
