"""Parts of a page that needs no network: the document, a section, a note, facts, and a figure of plotly.

Pages are light or dark, as the browser prefers. They fit a screen 400 pixels wide: what is wider, such as a
table or a timeline, scrolls in its own box (class "wide").
"""

from collections.abc import Iterable
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

PAGE_STYLE = """
:root { color-scheme: light dark; --page: #f4f4f5; --card: #ffffff; --text: #27272a; --faint: #5f5f68;
  --line: #e4e4e7; --rule: #f0f0f1; --warning: #b45309; }
@media (prefers-color-scheme: dark) {
  :root { --page: #09090b; --card: #18181b; --text: #e4e4e7; --faint: #a1a1aa;
    --line: #27272a; --rule: #27272a; --warning: #fbbf24; }
}
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
header { background: #18181b; color: #fafafa; padding: 22px 32px; overflow-wrap: anywhere; }
header h1 { margin: 0; font-size: 24px; } header p { margin: 4px 0 0; color: #a1a1aa; }
.facts { display: flex; flex-wrap: wrap; gap: 10px 32px; margin: 14px 0 0; }
.facts dt { color: #a1a1aa; font-size: 13px; } .facts dd { margin: 0; font-size: 17px; font-weight: 600; }
main { max-width: 1240px; margin: 0 auto; padding: 8px 24px 48px; } main.several { max-width: 1800px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px; }
section { margin: 8px 0; min-width: 0; }
h2 { font-size: 17px; margin: 0 0 8px; overflow-wrap: anywhere; } h3 { font-size: 15px; margin: 8px 0 0; }
.columns, .panels { display: grid; gap: 0 24px; grid-template-columns: minmax(0, 1fr); }
.panels { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
@media (min-width: 1100px) {
  .columns.two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .columns.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
}
.columns > *, .panels > * { min-width: 0; }
.runs { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 0 0 6px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0; padding: 0; list-style: none; }
.legend { font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 6px; border-radius: 2px; }
.wide { overflow-x: auto; } .timeline > * { min-width: 640px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); }
td { vertical-align: top; min-width: 9em; overflow-wrap: anywhere; }
td:first-child { min-width: 0; overflow-wrap: normal; }
th { color: var(--faint); font-weight: 500; vertical-align: bottom; }
th.number { text-align: right; min-width: 4.5em; }
td.number { text-align: right; white-space: nowrap; min-width: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: 4px 0; }
.note { color: var(--faint); font-size: 13.5px; margin: 6px 0; overflow-wrap: anywhere; }
.warning { color: var(--warning); }
code { background: var(--page); padding: 1px 5px; border-radius: 4px; font-size: 13px; }
.js-plotly-plot .main-svg text, .js-plotly-plot .legendtext { fill: var(--faint) !important; }
.js-plotly-plot .hoverlayer text { fill: #ffffff !important; }
@media (max-width: 640px) {
  .modebar-container { display: none; }
  header { padding: 16px; } header h1 { font-size: 20px; }
  .facts { gap: 8px 22px; } .facts dd { font-size: 15px; }
  main { padding: 4px 8px 32px; } section { padding: 12px; border-radius: 8px; }
}
"""


def html_document(title: str, style: str, body: str, plotly: str | None = None) -> str:
    """Returns a whole page around `body`; `title` is HTML. `plotly` is the address of plotly's script; None:
    the script itself is inside.
    """
    head = (
        f'<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width, initial-scale=1"><title>{title}</title><style>{style}</style>'
    )
    script = f"<script>{get_plotlyjs()}</script>" if plotly is None else f'<script src="{plotly}"></script>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{script}</head><body>{body}</body></html>\n'


def section(title: str, *parts: str) -> str:
    """Returns a section of a page; `title` and `parts` are HTML. "": without a title."""
    return f"<section>{f'<h2>{title}</h2>' if title else ''}{''.join(parts)}</section>"


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Returns names and texts for the head of a page, escaped; nothing if there are none."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in facts)
    return f'<dl class="facts">{items}</dl>' if items else ""


def note(html: str, kind: str = "note") -> str:
    """Returns a paragraph in small letters; nothing if it is empty. `kind` is its classes in PAGE_STYLE."""
    return f'<p class="{kind}">{html}</p>' if html else ""


def figure_html(figure: go.Figure, name: str, *, toolbar: bool = False) -> str:
    """Returns `figure` as HTML; `name` is its id on the page.

    With `toolbar`, plotly's buttons are above the plot.
    """
    config = {
        "displaylogo": False,
        "responsive": True,
        "modeBarButtonsToRemove": ["select2d", "lasso2d"],
        **({} if toolbar else {"displayModeBar": False}),
    }
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)


def legend_html(figure: go.Figure) -> str:
    """Returns the names of the bars of `figure` beside their colours: a list that wraps if it is long."""
    colours = {trace.name: trace.marker.color for trace in figure.select_traces(selector={"type": "bar"})}
    items = (f'<li><i style="background: {colour}"></i>{name}</li>' for name, colour in colours.items())
    return f'<ul class="legend">{"".join(items)}</ul>'
