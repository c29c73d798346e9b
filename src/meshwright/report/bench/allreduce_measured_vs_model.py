"""Measured all-reduces beside the network model: a table for the terminal, and a page with a plot."""

from html import escape
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.tuning.choose_size_rule import choose_rule, predict_all_reduce_s
from meshwright.plan.hardware.measured_cluster import Cluster
from meshwright.plan.job.errors import format_nbytes
from meshwright.report.html.charts import FIGURE_LAYOUT
from meshwright.report.html.page_elements import PAGE_STYLE, figure_html, html_document, note, section
from meshwright.report.table import Column, Table

PALETTE = ("#64748b", "#2563eb", "#ea580c", "#10b981", "#8b5cf6", "#dc2626", "#14b8a6", "#a16207", "#db2777")
MODEL_LABEL = "model alone"


def network_view(cluster: Cluster) -> RenderableType:
    """Returns a table per number of ranks, with a row per size.

    Measured times, and the error of the model alone.
    """
    parts: list[RenderableType] = [_summary(cluster)]
    for ranks in cluster.ranks:
        parts += [_table(cluster, ranks), Text(str(choose_rule(cluster, ranks)), style="green")]
    return Group(*parts)


def _summary(cluster: Cluster) -> Table:
    fit = cluster.fit_error
    hosts = (
        f"{cluster.ranks_per_host} ranks on each host" if cluster.ranks_per_host else "all ranks on one host"
    )
    error = (
        f"{100 * fit.model:.0f} % of the model alone, {100 * fit.corrected:.0f} % with the "
        f"correction from measured sizes (median, at sizes that were not fitted)"
    )
    measured_on = f"{cluster.machine}, {hosts}, over {cluster.transport}"
    return Table.of_pairs({"measured on": measured_on, "error": error})


def _table(cluster: Cluster, ranks: int) -> Table:
    found = cluster.seconds_by_algorithm(ranks)
    rows = []
    for nbytes in sorted({nbytes for seconds in found.values() for nbytes in seconds}):
        took = {name: seconds.get(nbytes) for name, seconds in found.items()}
        best = min(seconds for seconds in took.values() if seconds is not None)
        cells = (_time_cell(cluster, name, ranks, nbytes, each, best) for name, each in took.items())
        rows.append((nbytes, *cells))
    return Table(
        [Column("size", format_nbytes), *(Column(name, "{}") for name in found)],
        rows,
        title=f"{ranks} ranks: milliseconds, and the error of the model alone",
    )


def _time_cell(
    cluster: Cluster, name: str, ranks: int, nbytes: int, seconds: float | None, best: float
) -> Text | None:
    if seconds is None:
        return None
    text = Text.assemble((f"{1e3 * seconds:.3g}", "bold green" if seconds == best else ""))
    if name == BACKEND:
        return text
    return text.append(f" {100 * (_model_seconds(cluster, name, ranks, nbytes) / seconds - 1):+4.0f}%", "dim")


def _model_seconds(cluster: Cluster, name: str, ranks: int, nbytes: float) -> float:
    return predict_all_reduce_s(cluster.without_measurements(), name, ranks, nbytes)


def network_page(cluster: Cluster, version: str) -> str:
    """Returns a page that needs no network.

    Measured points, and lines for the model with and without correction.
    """
    notes = [
        (
            f"{escape(cluster.machine)}, over {escape(cluster.transport)}, torch "
            f"{escape(cluster.torch)}, "
            f"{escape(cluster.date)}."
        ),
        "Points: measured (bars: interquartile range). Dotted lines: the model alone, from the rounds of "
        "the algorithm. Thin lines: the model, corrected by measurements at neighbouring sizes; auto "
        "chooses by these.",
        *(escape(str(choose_rule(cluster, ranks))) for ranks in cluster.ranks),
    ]
    body = "".join(map(note, notes))
    end = note(f"Written by meshwright {escape(version)}. This file needs no network.")
    drawn = section("Measured and model", body, figure_html(network_figure(cluster), "links", toolbar=True))
    page = f"<header><h1>All-reduce</h1></header><main>{drawn}{end}</main>"
    return html_document("All-reduce: measured and model", PAGE_STYLE, page)


def network_figure(cluster: Cluster) -> go.Figure:
    """Returns a panel per number of ranks, both axes logarithmic: seconds over bytes of every algorithm."""
    panels = len(cluster.ranks)
    figure = make_subplots(rows=panels, cols=1, subplot_titles=[f"{ranks} ranks" for ranks in cluster.ranks])
    names = dict.fromkeys(series.algorithm for series in cluster.measurements)
    colours = dict(zip(names, cycle(PALETTE), strict=False))
    shown: set[str] = set()
    for series in cluster.measurements:
        name, row = series.algorithm, cluster.ranks.index(series.ranks) + 1
        common: dict[str, Any] = {
            "x": list(series.nbytes),
            "legendgroup": name,
            "line": {"color": colours[name], "width": 1},
        }
        bars = [seconds * spread / 2 for seconds, spread in zip(series.seconds, series.spread, strict=True)]
        points = {
            "mode": "markers",
            "marker": {"color": colours[name], "size": 7},
            "error_y": {"array": bars, "thickness": 1},
        }
        label = {"name": name, "showlegend": name not in shown}
        shown.add(name)
        figure.add_scatter(**common, y=list(series.seconds), **points, **label, row=row, col=1)
        smooth = [predict_all_reduce_s(cluster, name, series.ranks, nbytes) for nbytes in series.nbytes]
        figure.add_scatter(
            **common, y=smooth, mode="lines", name=f"{name}: corrected", showlegend=False, row=row, col=1
        )
        if name != BACKEND:
            common["line"] = {**common["line"], "dash": "dot", "width": 1.8}
            model = [_model_seconds(cluster, name, series.ranks, nbytes) for nbytes in series.nbytes]
            figure.add_scatter(
                **common,
                y=model,
                mode="lines",
                name=f"{name}: {MODEL_LABEL}",
                showlegend=False,
                row=row,
                col=1,
            )
    figure.update_layout(**FIGURE_LAYOUT, height=120 + 420 * panels)
    figure.update_layout(legend={"orientation": "h", "y": -0.1, "yanchor": "top"})
    figure.update_xaxes(type="log", title_text="bytes")
    figure.update_yaxes(type="log", title_text="seconds")
    return figure
