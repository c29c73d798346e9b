"""Draws the timeline of a run's report as an SVG: what each rank computes, planned above measured.

meshwright train examples/pipeline.toml --data.source text/ --train.steps 12 --run.trace_steps 4 --run.folder
runs/pipeline meshwright report runs/pipeline python -m docs.generator.timeline_image
runs/pipeline/report.html docs/images/timeline.svg
"""

import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

LEFT, WIDTH, ROW, BAR = 150, 810, 26, 18
STYLE = "font-family: system-ui, sans-serif; font-size: 12px; fill: #27272a"
LANE = "compute"  # of the lanes of a rank, the one that is drawn


class Bar(NamedTuple):
    """One event: its lane, category, color, begin and length in milliseconds; `planned` ones stand above."""

    planned: bool
    lane: str
    category: str
    color: str
    begin_ms: float
    length_ms: float


def bars(page: str) -> list[Bar]:
    """Returns the events of the timeline in a report's HTML."""
    start = page.index("Plotly.newPlot(", page.index("<h2>Timeline of a step"))
    traces, _ = json.JSONDecoder().raw_decode(page[page.index("[", start) :])
    return [bar for trace in traces for bar in _of_trace(trace)]


def _of_trace(trace: dict[str, Any]) -> Iterable[Bar]:
    for lane, begin, length in zip(trace["y"], trace["base"], trace["x"], strict=True):
        yield Bar(trace["xaxis"] == "x", lane, trace["name"], trace["marker"]["color"], begin, length)


def svg(found: list[Bar]) -> str:
    """Returns the picture."""
    found = [bar for bar in found if bar.lane.endswith(LANE)]
    scale = WIDTH / max(bar.begin_ms + bar.length_ms for bar in found)
    parts, top = [], 24
    for planned, title in ((True, "planned: the simulated program"), (False, "measured: the traced step")):
        parts.append(_text(LEFT, top, title, weight="600"))
        top += 10
        for lane in sorted({bar.lane for bar in found if bar.planned == planned}):
            parts.append(_text(LEFT - 10, top + 13, lane, anchor="end"))
            parts += [_bar(bar, top, scale) for bar in found if bar.planned == planned and bar.lane == lane]
            top += ROW
        top += 26
    parts += _axis(top - 12, scale)
    parts += _legend(found, top + 18)
    height = top + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" style="{STYLE}">'
    )
    return "\n".join([head, f'<rect width="100%" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _bar(bar: Bar, top: int, scale: float) -> str:
    width = max(bar.length_ms * scale - 0.3, 0.3)
    place = f'x="{LEFT + bar.begin_ms * scale:.1f}" y="{top}" width="{width:.1f}" height="{BAR}"'
    return f'<rect {place} fill="{bar.color}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
    )


def _axis(top: int, scale: float) -> list[str]:
    ticks = range(0, int(WIDTH / scale) + 1, 50 if WIDTH / scale < 600 else 100)
    return [_text(LEFT + tick * scale, top, f"{tick} ms", anchor="middle") for tick in ticks]


def _legend(found: list[Bar], top: int) -> list[str]:
    parts, left = [], LEFT
    for category, color in dict.fromkeys((bar.category, bar.color) for bar in found):
        parts.append(f'<rect x="{left}" y="{top - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(_text(left + 17, top, category))
        left += 30 + 7 * len(category)
    return parts


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(bars(Path(sys.argv[1]).read_text(encoding="utf-8"))), encoding="utf-8")
