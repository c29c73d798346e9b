"""The figures of a report: curves of one run and of several, smoothing, evaluations, colours."""

from collections.abc import Sequence
from colorsys import rgb_to_hls
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest

from meshwright.report.html.charts import (
    EVALUATION_COLOUR,
    SERIES_COLOURS,
    category_colours,
    curve_figures,
    run_colour,
    smoothed,
    stacked_figure,
    task_figure,
)
from meshwright.report.timeline.run_folder_reader import RunRecord


def record(steps: int, name: str = "one", evaluations: Sequence[int] = (), **more: float) -> RunRecord:
    """A run whose loss alternates between 2 and 4."""
    lines = [
        {"step": step, "loss": 3.0 + (-1) ** step, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 100.0, **more}
        for step in range(1, steps + 1)
    ]
    return RunRecord(name, lines, [{"step": step, "loss": 1.5} for step in evaluations], {})


def rgb(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]


def luminance(colour: str) -> float:
    parts = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.parametrize("colour", [*SERIES_COLOURS, EVALUATION_COLOUR])
def test_a_colour_of_a_series_is_no_grey_and_stands_out_on_light_and_on_dark_ground(colour: str):
    assert rgb_to_hls(*rgb(colour))[2] > 0.5
    assert 1.05 / (luminance(colour) + 0.05) > 3, "contrast with white, as WCAG asks of graphics"
    assert (luminance(colour) + 0.05) / (luminance("#18181b") + 0.05) > 3


def test_categories_without_a_colour_of_their_own_get_different_ones():
    names = ["computation", "forward", "pipeline bubble", "optimizer step", "fixed cost"]
    colours = category_colours(names)
    assert len(set(colours.values())) == len(names)
    figure = stacked_figure({"1.": dict.fromkeys(names, 2.0)}, "seconds")
    assert [(trace.name, trace.marker.color) for trace in figure.data] == list(colours.items())


def test_a_category_that_is_zero_everywhere_is_not_drawn():
    figure = stacked_figure({"a": {"x": 0.0, "y": 1.0}, "b": {"x": 0.0, "y": 0.0}}, "MiB")
    assert [trace.name for trace in figure.data] == ["y"]


def test_a_smoothed_curve_starts_at_the_first_value_and_passes_over_what_is_not_finite():
    assert smoothed([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert smoothed([1.0, nan, 3.0], 0.5) == pytest.approx([1.0, 1.0, (0.25 * 1.0 + 0.5 * 3.0) / 0.75])
    assert smoothed([inf])[0] == inf


def test_the_loss_has_a_thin_raw_line_and_a_smoothed_one_that_the_legend_explains():
    raw, average = curve_figures([record(40)])["loss"].data
    assert (raw.name, average.name) == ("loss", "loss, smoothed (EMA 0.9)")
    assert raw.line.width < average.line.width
    assert (
        max(abs(a - b) for a, b in pairwise(average.y[20:]))
        < 0.5
        < max(abs(a - b) for a, b in pairwise(raw.y))
    )
    assert len(curve_figures([record(5)])["loss"].data) == 1, "a few steps are not smoothed"
    assert len(curve_figures([record(40)])["grad_norm"].data) == 1


def test_evaluations_have_a_colour_of_their_own():
    training, evaluation = curve_figures([record(5, evaluations=[3])])["loss"].data
    assert (evaluation.name, evaluation.x, evaluation.y) == ("evaluation", (3,), (1.5,))
    assert evaluation.line.color == EVALUATION_COLOUR != training.line.color


def test_metrics_of_tasks_have_a_line_each_in_a_figure_of_their_own():
    assert task_figure([record(5)]) is None
    tasks = [{"step": step, "eval/small/acc": step / 10, "seconds": 1.0} for step in (2, 4)]
    figure = task_figure([replace(record(5), tasks=tasks)])
    assert figure is not None
    (line,) = figure.data
    assert (line.name, line.x, line.y) == ("small/acc", (2, 4), (0.2, 0.4))
    several = task_figure([replace(record(5, name), tasks=tasks) for name in ("one", "two")])
    assert several is not None
    assert [each.name for each in several.data] == ["one: small/acc", "two: small/acc"]


def test_several_runs_are_drawn_over_each_other_in_their_own_colours():
    records = [record(40, name, evaluations=[20]) for name in ("one", "two", "three")]
    figures = curve_figures(records)
    colours = [run_colour(index) for index in range(3)]
    assert [trace.line.color for trace in figures["lr"].data] == colours
    shown = [trace for trace in figures["loss"].data if trace.showlegend is not False]
    assert {(trace.name, trace.line.color) for trace in shown} == {
        (f"{each.name}{kind}", colour)
        for each, colour in zip(records, colours, strict=True)
        for kind in (", smoothed (EMA 0.9)", ": evaluation")
    }
    assert run_colour(len(SERIES_COLOURS)) == run_colour(0)


def test_a_long_run_is_thinned():
    long = curve_figures([record(9001)])["loss"]
    assert all(len(trace.x) == len(trace.y) <= 4000 for trace in long.data)


def test_the_noise_of_the_gradient_has_a_curve_where_a_run_measured_it():
    assert set(curve_figures([record(5)])) == {"loss", "grad_norm", "lr", "tokens_per_s"}
    figures = curve_figures([record(5), record(5, "two", noise_scale=7.5)])
    assert [set(trace.y) for trace in figures["noise_scale"].data] == [set(), {7.5}]
