"""Draws the Plotly figures of a report: curves, the timeline of a step, time and memory by category.

Texts from a run (names of blocks, of runs) are escaped here, because plotly interprets tags in them.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from meshwright.report.timeline.planned_vs_measured_spans import StepTimeline, TimelineBar
from meshwright.report.timeline.run_folder_reader import RunRecord

RUN_COLOURS = ("#2563eb", "#ea580c")  # the first run and the second
CATEGORY_COLOURS = {
    "forward": "#3b82f6",
    "backward": "#10b981",
    "packing": "#a3a3a3",
    "communication": "#f59e0b",
    "exposed communication": "#dc2626",
    "waiting": "#dc2626",
    "optimizer": "#8b5cf6",
    "data": "#14b8a6",
    "evaluate": "#db2777",
    "save": "#78716c",
    "step": "#3b82f6",
    "other": "#d4d4d8",
    "parameters": "#3b82f6",
    "gradients": "#10b981",
    "master": "#6366f1",
    "optimizer_states": "#8b5cf6",
    "buckets": "#f59e0b",
    "activations": "#ec4899",
}
MAX_POINTS = 4000  # of a curve; of more, every n-th is drawn
PANELS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_s": "tokens per second",
}
OPTIONAL_PANELS = {"noise_scale": "gradient noise scale (samples)"}  # panels of what only some runs measure
FIGURE_LAYOUT: Mapping[str, Any] = {
    "template": "plotly_white",
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#27272a"},
    "margin": {"l": 60, "r": 16, "t": 34, "b": 40},
    "hoverlabel": {"namelength": -1},
}


def curves_figure(records: Sequence[RunRecord]) -> go.Figure:
    """Returns loss (evaluations as dots), gradient norm, learning rate and speed over the step.

    A colour per run. If a run measured it, the gradient noise scale too.
    """
    lines = [line for record in records for line in record.steps]
    panels = PANELS | {
        key: title
        for key, title in OPTIONAL_PANELS.items()
        if any(line.get(key) is not None for line in lines)
    }
    rows = -(-len(panels) // 2)
    spacing = {"vertical_spacing": 0.28 / rows, "horizontal_spacing": 0.08}
    figure = make_subplots(rows=rows, cols=2, subplot_titles=list(panels.values()), **spacing)
    for record, colour in zip(records, RUN_COLOURS, strict=False):
        steps = record.steps[:: -(-len(record.steps) // MAX_POINTS) or 1]
        for place, key in enumerate(panels):
            shown = [line for line in steps if isinstance(line.get(key), int | float)]
            figure.add_scatter(
                **_points(shown, key),
                **{"mode": "lines" if len(shown) > 1 else "markers", "line": {"color": colour, "width": 1.8}},
                **{"name": escape(record.name), "legendgroup": record.name, "showlegend": place == 0},
                **{"row": place // 2 + 1, "col": place % 2 + 1},
            )
        evaluated = [line for line in record.evaluations if isinstance(line.get("loss"), int | float)]
        if evaluated:
            look = {
                "mode": "lines+markers",
                "line": {"color": colour, "width": 1, "dash": "dot"},
                "marker": {"size": 6},
            }
            figure.add_scatter(
                **_points(evaluated, "loss"), **look, name=f"{escape(record.name)}: evaluation", row=1, col=1
            )
    figure.update_layout(**FIGURE_LAYOUT, height=280 * rows, legend={"orientation": "h", "y": 1.1})
    figure.update_xaxes(title_text="step", row=rows)
    figure.update_yaxes(rangemode="tozero", row=2)
    return figure


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
    shown: set[str] = set()
    for place, bars in enumerate(parts, start=1):
        for part in dict.fromkeys(bar.category for bar in bars):
            figure.add_bar(
                **_bar_style([bar for bar in bars if bar.category == part], part, timeline),
                **_legend(part, shown),
                row=place,
                col=1,
            )
        names = sorted({bar.row for bar in bars}, key=_row_key, reverse=True)
        figure.update_yaxes(categoryorder="array", categoryarray=names, row=place, col=1)
    legend = {"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom"}
    figure.update_layout(
        **FIGURE_LAYOUT, barmode="overlay", bargap=0.25, height=190 + 30 * sum(rows), legend=legend
    )
    figure.update_layout(margin_l=130, margin_b=90)
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
        "marker": {"color": CATEGORY_COLOURS[category], "line": {"color": "white", "width": 0.6}},
        "customdata": [[escape(bar.name), escape(bar.details)] for bar in bars],
        "hovertemplate": f"<b>%{{customdata[0]}}</b> {unit}<br>%{{customdata[1]}}<extra></extra>",
    }


def _legend(category: str, shown: set[str]) -> dict[str, Any]:
    first = category not in shown
    shown.add(category)
    return {"name": category, "legendgroup": category, "showlegend": first}


def _row_key(row: str) -> tuple[int, int, str]:
    words = row.split()
    rank = int(words[1]) if words[0] == "rank" else -1
    stream = next((i for i, stream in enumerate(("run", "compute", "comm")) if stream in words), 3)
    return rank, stream, row


def stacked_figure(rows: Mapping[str, Mapping[str, float]], title: str) -> go.Figure:
    """Returns a stacked bar per row; `rows` is row -> category -> amount in the unit that `title` names."""
    figure = go.Figure()
    names = list(rows)
    for category in dict.fromkeys(
        category for amounts_by_category in rows.values() for category in amounts_by_category
    ):
        amounts = [rows[name].get(category, 0.0) for name in names]
        if any(amounts):
            colour = CATEGORY_COLOURS.get(category, CATEGORY_COLOURS["other"])
            hover = f"{escape(category)}: %{{x:.4g}}<extra>%{{y}}</extra>"
            figure.add_bar(
                x=amounts,
                y=names,
                orientation="h",
                name=escape(category),
                marker_color=colour,
                hovertemplate=hover,
            )
    legend = {"orientation": "h", "yref": "container", "y": 1.0, "yanchor": "top", "traceorder": "normal"}
    figure.update_layout(**FIGURE_LAYOUT, barmode="stack", height=130 + 30 * len(names), legend=legend)
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1])
    figure.update_xaxes(title_text=title, rangemode="tozero")
    return figure
