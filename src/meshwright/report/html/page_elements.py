"""Parts of a page that needs no network: the document, a section, a note, and a figure of plotly."""

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

PAGE_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f4f5; color: #27272a; font: 15px/1.5 system-ui, sans-serif; }
header { background: #18181b; color: #fafafa; padding: 22px 32px; }
header h1 { margin: 0; font-size: 24px; } header p { margin: 4px 0 0; color: #a1a1aa; }
main { max-width: 1240px; margin: 0 auto; padding: 8px 24px 48px; } main.pair { max-width: 1800px; }
section { background: white; border: 1px solid #e4e4e7; border-radius: 10px; padding: 16px 20px; }
section { margin: 8px 0; min-width: 0; }
h2 { font-size: 17px; margin: 0 0 8px; } h3 { font-size: 20px; margin: 22px 0 0; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(0, 1fr)); gap: 0 24px; }
.columns.two { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
@media (max-width: 1100px) { .columns.two { grid-template-columns: minmax(0, 1fr); } }
table { border-collapse: collapse; width: 100%; font-size: 14px; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid #f0f0f1; }
th, td { overflow-wrap: anywhere; }
td { vertical-align: top; } td:first-child { overflow-wrap: normal; }
th { color: #71717a; font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
.note { color: #52525b; font-size: 13.5px; margin: 6px 0; } .warning { color: #b45309; }
code { background: #f4f4f5; padding: 1px 5px; border-radius: 4px; font-size: 13px; }
.run-0, .differences th:nth-child(2) { color: #2563eb; }
.run-1, .differences th:nth-child(3) { color: #ea580c; }
"""


def html_document(title: str, style: str, body: str) -> str:
    """Returns a whole page around `body`, with plotly inside; `title` is HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{title}</title><style>{style}</style>'
    )
    script = f"<script>{get_plotlyjs()}</script>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}{script}</head><body>{body}</body></html>\n'


def section(title: str, *parts: str) -> str:
    """Returns a section of a page; `title` and `parts` are HTML."""
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def note(html: str, kind: str = "note") -> str:
    """Returns a paragraph in small letters; nothing if it is empty. `kind` is its classes in PAGE_STYLE."""
    return f'<p class="{kind}">{html}</p>' if html else ""


def figure_html(figure: go.Figure, name: str) -> str:
    """Returns `figure` as HTML; `name` is its id on the page."""
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
    return figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
