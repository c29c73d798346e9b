"""Progress of a run: aligned lines with units, a table and a bar on a terminal, and no MFU without a known
peak.
"""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from meshwright.report.terminal.progress import ProgressMetrics, format_duration, format_line, training_view

FIRST = ProgressMetrics(1, 10.345678, 12.5, 3e-4, 3 * 2**20, 12345.6, flops_per_s=2.5e9)
LATER = ProgressMetrics(2, 1.9, 0.4, 1e-6, 300 * 2**20, 999.0, flops_per_s=1.5e12)
ON_GPU = ProgressMetrics(3, 1.9, 0.4, 1e-6, 2**34, 1e6, flops_per_s=4e14, mfu=0.4044)


def lines(steps: int, shown: range, first: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=40, color_system=None)
    with training_view(console, steps, first) as show:
        for step in shown:
            show(ProgressMetrics(step, 1.0, 1.0, 1.0, 1, 1.0))
    return console.file.getvalue().splitlines()


def test_every_figure_has_its_unit_in_the_cell_or_in_the_name():
    cells = FIRST.cells()
    assert list(cells) == ["loss", "grad_norm", "lr", "memory", "tokens/s", "GFLOP/s"]
    assert list(cells.values()) == ["10.3457", "12.500", "3.00e-04", "3 MiB", "12,346", "2.5"]
    assert ON_GPU.cells()["mfu"] == "40.4 %"


def test_a_device_without_a_known_peak_has_no_mfu_and_a_model_without_known_operations_no_speed():
    assert "mfu" not in FIRST.cells()
    assert "GFLOP/s" not in ON_GPU.cells()
    assert not {"mfu", "GFLOP/s"} & set(ProgressMetrics(1, 1.0, 1.0, 1.0, 1, 1.0).cells())


def test_the_loss_scale_is_shown_where_there_is_one():
    scaled = replace(ON_GPU, loss_scale=65536.0)
    assert ON_GPU.loss_scale_cell() == {}
    assert scaled.loss_scale_cell() == {"scale": "65536"}
    assert scaled.cells() == ON_GPU.cells()
    for terminal, said in ((False, "65536"), (True, "loss scale 65536")):
        console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=terminal)
        with training_view(console, 3, 0) as show:
            show(scaled)
        assert said in console.file.getvalue()


def test_figures_of_the_same_size_stand_under_each_other_and_under_their_names():
    head, first, later = (
        format_line(cells) for cells in ({name: name for name in FIRST.cells()}, FIRST.cells(), LATER.cells())
    )
    ends = [[match.end() for match in re.finditer(r"\S+( MiB)?", line)] for line in (head, first, later)]
    assert ends[0] == ends[1] == ends[2]


def test_elsewhere_a_run_is_a_head_and_about_twenty_lines_each_whole():
    head, *said = lines(200, range(1, 201))
    assert head.split() == ["step", "loss", "grad_norm", "lr", "memory", "tokens/s", "ETA"]
    assert [int(re.match(r" *(\d+)/200 ", line)[1]) for line in said] == [1, *range(10, 201, 10)]
    assert all(len(line) == len(head) <= 80 for line in said)
    assert [line.split()[0] for line in lines(3, range(1, 4))] == ["step", "1/3", "2/3", "3/3"]


def test_a_line_with_every_figure_fits_into_80_columns():
    console = Console(file=io.StringIO(), width=40, color_system=None)
    with training_view(console, 100_000, 0) as show:
        show(ProgressMetrics(1, 10.1234, 100.123, 3e-4, 2**34, 1e6, 4e14, 0.404))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_a_run_that_goes_on_shows_its_first_step_too():
    assert lines(200, range(57, 71), first=56)[1].split()[0] == "57/200"


def test_a_terminal_of_80_columns_shows_every_figure():
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    with training_view(console, 200, 0) as show:
        show(FIRST)
        show(ON_GPU)
    text = console.file.getvalue()
    for name, cell in {"step": "3/200", **ON_GPU.cells()}.items():
        assert name in text
        assert cell in text
    assert "\u2026" not in text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (125, "0:02:05"), (90000, "1 day, 1:00:00")])
def test_durations_are_in_hours_minutes_and_seconds(seconds: float, text: str):
    assert format_duration(seconds) == text
