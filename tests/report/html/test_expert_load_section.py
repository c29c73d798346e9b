"""The section on the load of experts: sums over the lines of a run, as a map and as a table."""

from meshwright.report.html.expert_load_section import expert_load_figure, expert_load_section
from meshwright.report.timeline.run_folder_reader import RunRecord

LAYER = "layers.0.experts"


def record_of(*lines: dict[str, object]) -> RunRecord:
    loads = [{"step": step, "layers": {LAYER: line}} for step, line in enumerate(lines)]
    return RunRecord("one", [], [], {}, expert_loads=loads)


def test_loads_of_all_lines_are_added():
    line = {"experts": [6, 0, 2, 0], "ranks": [6, 2], "dropped": 2}
    figure, table, _ = expert_load_section(record_of(line, line), "figure")
    cells = [LAYER, "16", "0", "3 x", "2", "20.00%", "0", "1.5 x"]
    assert table.count("<tr>") == 2
    assert [table.find(f">{cell}<") > 0 for cell in cells] == [True] * len(cells)
    assert 'id="figure"' in figure


def test_ranks_of_the_last_start_are_shown():
    before, after = (
        {"experts": [1, 1, 1, 1], "ranks": ranks, "dropped": 0} for ranks in ([1, 1, 1, 1], [2, 2])
    )
    assert ">1 x<" in expert_load_section(record_of(before, after), "figure")[1]
    without = {"experts": [1, 1, 1, 1], "ranks": [], "dropped": 0}
    assert "busiest rank" not in expert_load_section(record_of(before, without), "figure")[1]


def test_a_run_without_experts_has_no_section():
    assert expert_load_section(record_of(), "figure") == ()


def test_the_map_shows_loads_over_the_mean_of_the_layer():
    (drawn,) = expert_load_figure({LAYER: [6, 0, 2, 0], "unused": [0, 0]}).data
    assert [list(row) for row in drawn.z] == [[3.0, 0.0, 1.0, 0.0], [0.0, 0.0]]
