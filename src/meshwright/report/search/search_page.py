"""The result of a search as one HTML file that needs no network.

Step time against memory, time by category, the schedule.

    each dot     a configuration that fits; on hover: axes, ZeRO stage, schedule, microbatches
    the line     the Pareto front: none is both faster and smaller
    the chart    the schedule of the winner, with seconds from the closed form
"""

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.step.simulator import SpansByRank
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search import Candidate
from meshwright.report.html.charts import FIGURE_LAYOUT, SERIES_COLOURS, stacked_figure
from meshwright.report.html.page_elements import (
    PAGE_STYLE,
    figure_html,
    html_document,
    legend_html,
    note,
    section,
)
from meshwright.report.search.search_result import TIME_CATEGORIES, category_seconds, config_text, to_gib
from meshwright.report.table import Column, Table
from meshwright.report.timeline.gantt_svg import gantt_svg
from meshwright.report.timeline.gantt_text import DrawingUnits

MAX_DRAWN = 8  # configurations whose seconds are drawn


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns those of `candidates` of which no other is both as fast and as small, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: (each.seconds, each.memory.total)):
        if not front or each.memory.total < front[-1].memory.total:
            front.append(each)
    return front


def pareto_figure(candidates: Sequence[Candidate]) -> go.Figure:
    """Returns a plot of step seconds over the GiB of the rank that uses most."""
    front = pareto_front(candidates)
    figure = go.Figure()
    hover = "<b>%{y:.3g} s, %{x:.1f} GiB</b><br>%{text}<extra></extra>"
    for points, look in (
        (
            candidates,
            {
                "mode": "markers",
                "marker": {"color": SERIES_COLOURS[0], "size": 7, "opacity": 0.6},
                "name": "configurations",
            },
        ),
        (
            front,
            {
                "mode": "lines+markers",
                "marker": {"color": SERIES_COLOURS[1], "size": 9},
                "name": "Pareto front",
            },
        ),
    ):
        figure.add_scatter(
            x=[to_gib(each.memory.total) for each in points],
            y=[each.seconds for each in points],
            text=[escape(config_text(each)) for each in points],
            hovertemplate=hover,
            **look,
        )
    figure.update_layout(
        **FIGURE_LAYOUT, height=460, legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"}
    )
    figure.update_xaxes(title_text="GiB on the rank that uses most", rangemode="tozero")
    figure.update_yaxes(title_text="seconds of a step", rangemode="tozero")
    return figure


def search_page(
    request: SearchRequest, candidates: Sequence[Candidate], spans: SpansByRank, reasons: Iterable[str]
) -> str:
    """Returns the page: `candidates`, the winner first.

    `spans` of its schedule (empty: no pipeline), `reasons` as texts.
    """
    title = escape(
        f"{request.shape.name} on {request.machine.num_devices} {request.machine.device.name}, "
        f"global batch {request.batch:,} samples"
    )
    seconds_by_config = {
        f"{number}.": {text: category_seconds(each, category) for category, text in TIME_CATEGORIES.items()}
        for number, each in enumerate(candidates[:MAX_DRAWN], start=1)
    }
    times = stacked_figure(seconds_by_config, "seconds of a step")
    configurations = Table(
        ["", "configuration", Column("seconds of a step", "{:.3g}"), Column("GiB", "{:.1f}")],
        [
            (f"{number}.", config_text(each), each.seconds, to_gib(each.memory.total))
            for number, each in enumerate(candidates[:MAX_DRAWN], start=1)
        ],
    )
    schedule = (
        gantt_svg({"the first configuration": spans}, units=DrawingUnits("{:.4g} s".format, format_nbytes))
        if spans
        else ""
    )
    if schedule:
        drawn = f'<div class="wide">{schedule}</div>'
    elif candidates[0].layer_assignment:
        drawn = note("Schedules on heterogeneous devices are not drawn.")
    else:
        drawn = note("The first configuration has no pipeline.")
    body = [
        f"<header><h1>{title}</h1></header><main>",
        section("Step time and memory", figure_html(pareto_figure(candidates), "pareto", toolbar=True)),
        section(
            "Step time by category", legend_html(times), figure_html(times, "seconds"), configurations.html()
        ),
        section("Pipeline schedule", drawn),
        section("Reasons", *(note(escape(line)) for line in reasons)),
        "</main>",
    ]
    return html_document(title, PAGE_STYLE, "".join(body))
