"""The plot of a search: time and memory of configurations, and the schedule of the best one by the analytic
cost model.
"""

import re
from pathlib import Path

import pytest

from meshwright.commands.search.constraints import SCHEDULES
from meshwright.commands.search.plot import plotted_candidates, winner_timeline, write_plot
from meshwright.commands.search.search import SearchOptions, run_search
from meshwright.plan.job.errors import PlanError
from meshwright.report.search.search_page import pareto_front

SMALL = "small: layers 24 hidden 2048 heads 16 gated vocab 32000"


def test_no_layout_on_the_line_is_both_slower_and_larger_than_another():
    found = plotted_candidates(run_search(SearchOptions(SMALL, 8, "a100", 64)))
    front = pareto_front(found)
    assert front[0] == min(found, key=lambda each: (each.seconds, each.memory.total))
    assert front[-1].memory.total == min(each.memory.total for each in found)
    for one in front:
        assert not any(each.seconds < one.seconds and each.memory.total < one.memory.total for each in found)
    assert front[-1].memory.total < front[0].memory.total / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_drawn_schedule_takes_the_time_of_the_cost_model(schedule: str):
    large = "large: layers 24 hidden 8192 heads 64 vocab 4000 sequence 4096"
    chosen = run_search(
        SearchOptions(
            large,
            16,
            "a100",
            8,
            constraints=("pp=4", "tp=4", f"schedule={schedule}", "micro_batch=1", "zero=0"),
        )
    )
    best = chosen.result.best[0]
    rows = winner_timeline(chosen.request, best)
    assert len(rows) == 4
    drawn = max(span.end for row in rows for span in row)
    said = best.step.compute + best.step.tp_comm + best.step.pipeline_wait
    assert drawn == pytest.approx(said, rel=0.1)


def test_the_page_needs_no_network_and_says_why(tmp_path: Path):
    path = tmp_path / "plot.html"
    write_plot(run_search(SearchOptions(SMALL, 8, "a100", 64, constraints=("pp=2",))), path)
    text = path.read_text()
    assert "GiB on the rank that uses most" in text
    assert "seconds of a step" in text
    assert "configurations were estimated" in text
    assert "<svg" in text
    assert "<script src" not in text
    legend = re.findall(r'<li><i style="background: (#\w+)"></i>([^<]+)</li>', text)
    assert {"computation", "data-parallel communication", "pipeline bubble"} <= {name for _, name in legend}
    assert len({colour for colour, _ in legend}) == len(legend), "every category has its own colour"
    write_plot(run_search(SearchOptions(SMALL, 8, "a100", 64, constraints=("pp=1",))), path)
    assert "The first configuration has no pipeline." in path.read_text()


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path):
    with pytest.raises(PlanError, match="the plot cannot be written"):
        write_plot(run_search(SearchOptions(SMALL, 2, "a100", 8)), tmp_path / "none" / "plot.html")
