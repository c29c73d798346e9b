"""What a search found as one HTML file that needs no network: step time against memory, where the seconds go, who works when.

each dot     a layout that fits; to hover: its axes, shares, order and rows
the line     layouts of which none is both faster and smaller
the drawing  turns of ranks along pp under the winner, with seconds from its sketch
"""

from collections.abc import Iterable, Sequence
from html import escape

import plotly.graph_objects as go

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.step.simulator import SpansByRank
from meshwright.planner.search.request import Wish
from meshwright.planner.search.search import Candidate
from meshwright.report.html.charts import LAYOUT, stacked
from meshwright.report.html.run_page import STYLE, document
from meshwright.report.search.search_result import PARTS, gib, name, spent_on
from meshwright.report.timeline.gantt_svg import order_svg
from meshwright.report.timeline.gantt_text import Units

SHOWN = 8  # layouts whose seconds are drawn


def pareto(found: Iterable[Candidate]) -> list[Candidate]:
    """Those of `found` of which no other is both as fast and as small, the fastest first."""
    front: list[Candidate] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.footprint.total)):
        if not front or each.footprint.total < front[-1].footprint.total:
            front.append(each)
    return front


def pareto_figure(found: Sequence[Candidate]) -> go.Figure:
    """Seconds of a step over GiB of the fullest rank."""
    front = pareto(found)
    figure = go.Figure()
    hover = "<b>%{y:.3g} s, %{x:.1f} GiB</b><br>%{text}<extra></extra>"
    for points, look in (
        (found, {"mode": "markers", "marker": {"color": "#93c5fd", "size": 7}, "name": "layouts"}),
        (
            front,
            {
                "mode": "lines+markers",
                "marker": {"color": "#ea580c", "size": 9},
                "name": "none faster and smaller",
            },
        ),
    ):
        figure.add_scatter(
            x=[gib(each.footprint.total) for each in points],
            y=[each.seconds for each in points],
            text=[escape(name(each)) for each in points],
            hovertemplate=hover,
            **look,
        )
    figure.update_layout(**LAYOUT, height=460, legend={"orientation": "h", "y": 1.08})
    figure.update_xaxes(title_text="GiB of the fullest rank", rangemode="tozero")
    figure.update_yaxes(title_text="seconds of a step", rangemode="tozero")
    return figure


def choice_page(wish: Wish, found: Sequence[Candidate], rows: SpansByRank, words: Iterable[str]) -> str:
    """The page: `found`, the winner first; `rows` are the winner's turns (none: one rank along pp), `words` the reasons."""
    title = escape(
        f"{wish.shape.name} on {wish.machine.count} {wish.machine.device.name}, {wish.batch:,} rows of a step"
    )
    spent = {
        f"{number}. {name(each)}": {said: spent_on(each, part) for part, said in PARTS.items()}
        for number, each in enumerate(found[:SHOWN], start=1)
    }
    times = stacked({escape(row): parts for row, parts in spent.items()}, "seconds of a step")
    times.update_layout(margin_l=430)
    drawn = (
        order_svg({"the first layout": rows}, units=Units("{:.4g} s".format, format_nbytes)) if rows else ""
    )
    body = [
        f"<header><h1>{title}</h1></header><main>",
        _section("Step time and memory", _html(pareto_figure(found), "pareto")),
        _section("Where the seconds go", _html(times, "seconds")),
        _section("Who works when", f'<div class="wide">{drawn}</div>') if drawn else _undrawn(found[0]),
        _section("Why", "".join(f'<p class="note">{escape(line)}</p>' for line in words)),
        "</main>",
    ]
    return document(title, STYLE, "".join(body))


def _undrawn(best: Candidate) -> str:
    text = (
        "Turns of unlike devices are not drawn."
        if best.dealt
        else "No ranks along pp take turns in the first layout."
    )
    return _section("Who works when", f'<p class="note">{text}</p>')


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{title}</h2>{inside}</section>"


def _html(figure: go.Figure, name: str) -> str:
    config = {"displaylogo": False, "responsive": True}
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
