"""Draws the Plotly figures of a report: curves, the timeline of a step, time and memory by category.

Texts from a run (names of blocks, of runs) are escaped here, because plotly interprets tags in them.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from math import isfinite
from typing import Any

import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

from meshwright.report.timeline.planned_vs_measured_spans import StepTimeline, TimelineBar
from meshwright.report.timeline.run_folder_reader import RunRecord

# of series without a colour of their own: far apart in hue, and readable on a white and on a black ground
SERIES_COLOURS = (
    *("#3b82f6", "#ea580c", "#16a34a", "#a855f7"),
    *("#0d9488", "#a16207", "#dc2626", "#4d7c0f"),
)
EVALUATION_COLOUR = "#db2777"  # of one run; of several runs, a colour says which run it is
CATEGORY_COLOURS = {
    "forward": "#3b82f6",
    "backward": "#10b981",
    "packing": "#65a30d",
    "communication": "#f59e0b",
    "exposed communication": "#dc2626",
    "copies": "#0d9488",
    "waiting": "#dc2626",
    "optimizer": "#8b5cf6",
    "data": "#0891b2",
    "evaluate": "#db2777",
    "save": "#a16207",
    "step": "#3b82f6",
    "other": "#a1a1aa",
    "parameters": "#3b82f6",
    "gradients": "#10b981",
    "master": "#0891b2",
    "optimizer_states": "#8b5cf6",
    "strategy_states": "#6366f1",
    "buckets": "#f59e0b",
    "activations": "#ec4899",
}
MAX_POINTS = 4000  # of a curve; of more, every n-th is drawn
SMOOTHING_WEIGHT = 0.9  # of the past in a smoothed loss
MIN_SMOOTHED_STEPS = 20  # a shorter curve is not smoothed
PANELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
}
OPTIONAL_PANELS = {  # panels of what only some runs measure
    "noise_scale": "gradient noise scale (samples)",
    "busiest_expert": "busiest expert (x mean)",
    "busiest_rank": "rank with the busiest experts (x mean)",
    "dropped_share": "share of dropped choices",
}
GRID_COLOUR = "rgba(127, 127, 127, 0.22)"
# no ground of its own, so that the page decides between light and dark
FIGURE_LAYOUT: Mapping[str, Any] = {
    "template": go.layout.Template(pio.templates["plotly_white"]).update(
        layout={
            "xaxis": {"gridcolor": GRID_COLOUR, "zerolinecolor": GRID_COLOUR, "automargin": True},
            "yaxis": {"gridcolor": GRID_COLOUR, "zerolinecolor": GRID_COLOUR, "automargin": True},
        }
    ),
    "paper_bgcolor": "rgba(0, 0, 0, 0)",
    "plot_bgcolor": "rgba(0, 0, 0, 0)",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#71717a"},
    "margin": {"l": 44, "r": 12, "t": 34, "b": 40},
    "hoverlabel": {"namelength": -1},
    "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": "#a1a1aa", "activecolor": "#71717a"},
}


def run_colour(index: int) -> str:
    """Returns the colour of the run at `index` of a report."""
    return SERIES_COLOURS[index % len(SERIES_COLOURS)]


def smoothed(values: Sequence[float], weight: float = SMOOTHING_WEIGHT) -> list[float]:
    """Returns the exponential moving average of `values`, without a bias towards the start (as TensorBoard).

    A value that is not finite leaves the average as it is.
    """
    averages: list[float] = []
    total = mass = 0.0
    for value in values:
        if isfinite(value):
            total, mass = weight * total + (1 - weight) * value, weight * mass + 1 - weight
        averages.append(total / mass if mass else value)
    return averages


def curve_figures(records: Sequence[RunRecord]) -> dict[str, go.Figure]:
    """Returns a figure over the step for each panel: loss, gradient norm, learning rate, speed ...

    The loss has evaluations and a smoothed line too. The gradient noise scale and the load of experts are
    there if a run measured them.
    """
    lines = [line for record in records for line in record.steps]
    optional = {
        key: title
        for key, title in OPTIONAL_PANELS.items()
        if any(line.get(key) is not None for line in lines)
    }
    figures = {key: _curve_figure(records, key) for key in (PANELS | optional)}
    _add_evaluations(figures["loss"], records)
    figures["tokens_per_s"].update_yaxes(rangemode="tozero")
    figures["grad_norm"].update_yaxes(rangemode="tozero")
    return figures


def _curve_figure(records: Sequence[RunRecord], key: str) -> go.Figure:
    figure = go.Figure()
    for index, record in enumerate(records):
        shown = [line for line in record.steps if isinstance(line.get(key), int | float)]
        every = -(-len(shown) // MAX_POINTS) or 1
        points, averages = shown[::every], []
        if key == "loss" and len(shown) >= MIN_SMOOTHED_STEPS:
            averages = smoothed([line[key] for line in shown])[::every]
        name = escape(record.name) if len(records) > 1 else PANELS.get(key, key)
        group = {"line_color": run_colour(index), **_legend_group(records, record)}
        figure.add_scatter(
            **_points(points, key),
            **group,
            mode="lines" if len(points) > 1 else "markers",
            line_width=1 if averages else 1.8,
            opacity=0.55 if averages else 1,
            name=name,
            showlegend=len(records) == 1 or not averages,
        )
        if averages:
            label = f"{name}, smoothed (EMA {SMOOTHING_WEIGHT:g})"
            steps = [line["step"] for line in points]
            figure.add_scatter(x=steps, y=averages, **group, mode="lines", line_width=2.4, name=label)
    legend = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0, "xanchor": "left"}
    height = 300 + 24 * len(records) if key == "loss" else 240
    figure.update_layout(**FIGURE_LAYOUT, height=height, legend=legend, showlegend=key == "loss")
    figure.update_layout(margin_t=34 if key == "loss" else 10)
    figure.update_xaxes(title_text="step")
    return figure


def _add_evaluations(figure: go.Figure, records: Sequence[RunRecord]) -> None:
    for index, record in enumerate(records):
        found = [line for line in record.evaluations if isinstance(line.get("loss"), int | float)]
        single = len(records) == 1
        if found:
            figure.add_scatter(
                **_points(found, "loss"),
                mode="lines+markers",
                line={
                    "color": EVALUATION_COLOUR if single else run_colour(index),
                    "width": 1.6,
                    "dash": "dot",
                },
                marker={"size": 8, "symbol": "diamond"},
                name="evaluation" if single else f"{escape(record.name)}: evaluation",
                **_legend_group(records, record),
            )


def task_figure(records: Sequence[RunRecord]) -> go.Figure | None:
    """Returns the metrics of tasks over the step, a line for each; None if no run has evaluated any."""
    figure = go.Figure()
    for index, record in enumerate(records):
        for key in dict.fromkeys(key for line in record.tasks for key in line if key.startswith("eval/")):
            found = [line for line in record.tasks if isinstance(line.get(key), int | float)]
            name = escape(key.removeprefix("eval/"))
            style: dict[str, Any] = {} if len(records) == 1 else {"line_color": run_colour(index)}
            figure.add_scatter(
                **_points(found, key),
                **style,
                **_legend_group(records, record),
                mode="lines+markers",
                name=name if len(records) == 1 else f"{escape(record.name)}: {name}",
            )
    if not figure.data:
        return None
    figure.update_layout(**FIGURE_LAYOUT, height=300, showlegend=True)
    figure.update_xaxes(title_text="step")
    return figure


def _legend_group(records: Sequence[RunRecord], record: RunRecord) -> dict[str, str]:
    """The lines of a run are a column of the legend; those of the only run are beside each other."""
    return {"legendgroup": record.name} if len(records) > 1 else {}


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Any]]:
    return {"x": [line["step"] for line in lines], "y": [line[key] for line in lines]}


def timeline_figure(timeline: StepTimeline) -> go.Figure:
    """Returns the step on its streams, planned above measured.

    On one scale of milliseconds if both are measured.
    """
    parts = [bars for bars in (timeline.planned, timeline.measured) if bars]
    titles = [
        *(["planned"] if timeline.planned else []),
        *([f"measured, step {timeline.step}"] if timeline.measured else []),
    ]
    rows = [len({bar.row for bar in bars}) for bars in parts]
    figure = make_subplots(
        rows=len(parts),
        cols=1,
        shared_xaxes=True,
        subplot_titles=titles,
        row_heights=rows,
        vertical_spacing=0.16 / len(parts),
    )
    for place, bars in enumerate(parts, start=1):
        for part in dict.fromkeys(bar.category for bar in bars):
            figure.add_bar(
                **_bar_style([bar for bar in bars if bar.category == part], part, timeline),
                name=part,
                row=place,
                col=1,
            )
        names = sorted({bar.row for bar in bars}, key=_row_key, reverse=True)
        figure.update_yaxes(categoryorder="array", categoryarray=names, row=place, col=1)
    figure.update_layout(
        **FIGURE_LAYOUT, barmode="overlay", bargap=0.25, height=140 + 30 * sum(rows), showlegend=False
    )
    figure.update_layout(margin_l=130)
    figure.update_annotations(x=0, xanchor="left")  # the titles: in sight where the figure is scrolled
    title = (
        "milliseconds since the step began"
        if timeline.has_times
        else "scaled by operations; no times are known"
    )
    figure.update_xaxes(title_text=title, showticklabels=timeline.has_times, row=len(parts), col=1)
    return figure


def _bar_style(bars: Sequence[TimelineBar], category: str, timeline: StepTimeline) -> dict[str, Any]:
    unit = "%{x:.3f} ms" if timeline.has_times else ""
    return {
        "y": [bar.row for bar in bars],
        "x": [bar.length for bar in bars],
        "base": [bar.begin for bar in bars],
        "orientation": "h",
        "marker": {"color": CATEGORY_COLOURS[category], "line": {"color": GRID_COLOUR, "width": 0.6}},
        "customdata": [[escape(bar.name), escape(bar.details)] for bar in bars],
        "hovertemplate": f"<b>%{{customdata[0]}}</b> {unit}<br>%{{customdata[1]}}<extra></extra>",
    }


def _row_key(row: str) -> tuple[int, int, str]:
    words = row.split()
    rank = int(words[1]) if words[0] == "rank" else -1
    stream = next((i for i, stream in enumerate(("run", "compute", "comm")) if stream in words), 3)
    return rank, stream, row


def category_colours(categories: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each category: that of CATEGORY_COLOURS, or else one that no other of them has."""
    known = {category: CATEGORY_COLOURS[category] for category in categories if category in CATEGORY_COLOURS}
    free = cycle([colour for colour in SERIES_COLOURS if colour not in known.values()] or SERIES_COLOURS)
    return {category: known.get(category) or next(free) for category in categories}


def stacked_figure(rows: Mapping[str, Mapping[str, float]], title: str) -> go.Figure:
    """Returns a stacked bar per row; `rows` is row -> category -> amount in the unit that `title` names.

    It has no legend: that of `legend_html` wraps on a narrow screen.
    """
    figure = go.Figure()
    names = list(rows)
    categories = dict.fromkeys(
        category for amounts in rows.values() for category, amount in amounts.items() if amount
    )
    for category, colour in category_colours(list(categories)).items():
        figure.add_bar(
            x=[rows[name].get(category) or 0.0 for name in names],
            y=names,
            orientation="h",
            name=escape(category),
            marker={"color": colour, "line": {"color": GRID_COLOUR, "width": 0.6}},
            hovertemplate=f"{escape(category)}: %{{x:.4g}}<extra>%{{y}}</extra>",
        )
    figure.update_layout(**FIGURE_LAYOUT, barmode="stack", height=80 + 30 * len(names), showlegend=False)
    figure.update_layout(margin_t=8)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    figure.update_xaxes(title_text=title, rangemode="tozero")
    return figure
