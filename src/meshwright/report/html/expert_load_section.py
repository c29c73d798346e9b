"""The section of a page on the load of experts: of each expert over all steps, and what the most loaded one,
and the most loaded rank, had.

Whoever is chosen most is waited for: with experts on several ranks a layer takes as long as its busiest rank.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from meshwright.plan.sharding.expert_load import busiest
from meshwright.report.html.charts import FIGURE_LAYOUT
from meshwright.report.html.page_elements import figure_html, note
from meshwright.report.table import Column, Table
from meshwright.report.timeline.run_folder_reader import RunRecord

LOAD_NOTE = (
    "Choices of all tokens, padding included, over all recorded steps; x: over the mean of the layer. A rank "
    "has the choices of its experts. The curves show the largest of each step."
)
MAX_SHOWN_LAYERS = 24


def expert_load_section(record: RunRecord, name: str) -> tuple[str, ...]:
    """Returns the parts of the section, with a figure of that `name`; none for a run without experts."""
    layers = _sums(record.expert_loads)
    if not layers:
        return ()
    loads = {layer: sums["experts"] for layer, sums in layers.items()}
    return figure_html(expert_load_figure(loads), name), _table(layers).html(), note(LOAD_NOTE)


def expert_load_figure(loads: Mapping[str, Sequence[int]]) -> go.Figure:
    """Returns a map of the load of each expert over the mean of its layer; `loads` are counts by layer."""
    relative = [[count * len(counts) / (sum(counts) or 1) for count in counts] for counts in loads.values()]
    figure = go.Figure(
        go.Heatmap(
            z=relative,
            y=[escape(layer) for layer in loads],
            zmin=0,
            zmax=max(2, *(max(row) for row in relative)),
            zmid=1,
            colorscale="RdBu_r",
            colorbar={"title": "x mean"},
            hovertemplate="%{y}, expert %{x}: %{z:.3g} x the mean<extra></extra>",
        )
    )
    figure.update_layout(**FIGURE_LAYOUT, height=120 + 24 * len(relative))
    figure.update_layout(margin_t=8)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="expert")
    return figure


def _sums(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the sums of all lines, by layer."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        for layer, counts in line["layers"].items():
            before = found.get(layer)
            found[layer] = dict(counts) if before is None else _added(before, counts)
    return found


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    ranks = after["ranks"]
    if len(ranks) == len(before["ranks"]):  # else a run was resumed on other ranks: the last ones are shown
        ranks = [a + b for a, b in zip(before["ranks"], ranks, strict=True)]
    experts = [a + b for a, b in zip(before["experts"], after["experts"], strict=True)]
    return {"experts": experts, "ranks": ranks, "dropped": before["dropped"] + after["dropped"]}


def _table(layers: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = []
    for layer, sums in layers.items():
        experts, ranks, dropped = sums["experts"], sums["ranks"], sums["dropped"]
        row = (
            layer,
            sum(experts),
            experts.index(max(experts)),
            busiest(experts),
            experts.count(0),
            dropped / ((sum(experts) + dropped) or 1),
        )
        rows.append((*row, *((ranks.index(max(ranks)), busiest(ranks)) if ranks else (None, None))))
    columns: list[Column | str] = [
        "layer",
        Column("choices", "{:,}"),
        *(Column("busiest expert", "{}"), Column("its load", "{:.3g} x")),
        *(Column("never chosen", "{:,}"), Column("dropped", "{:.2%}")),
        *(Column("busiest rank", "{}"), Column("its load", "{:.3g} x")),
    ]
    shown = len(columns) if any(row[-1] is not None for row in rows) else len(columns) - 2
    return Table(
        columns[:shown],
        [row[:shown] for row in rows],
        max_rows=MAX_SHOWN_LAYERS,
        more="and {} more layers",
    )
