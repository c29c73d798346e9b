"""Draws a schedule as a standalone SVG: a row of boxes per rank, its memory below, all on one scale.

planned       [F0][F1]      [B0   ][B1   ]      box: its kind's colour, darker for later virtual stages, a
                                                tooltip
rank 0        .oooo..........oooooooooooooo.    red ground: the rank waits; amber: for a message in flight
measured      ...
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from meshwright.plan.job.errors import format_nbytes
from meshwright.plan.step.simulator import SimulationDeadlock, SpansByRank, TimelineSpan
from meshwright.report.timeline.gantt_text import KIND_NAMES, DrawingUnits, schedule_summary
from meshwright.report.timeline.pipeline_stages import row_label
from meshwright.report.timeline.planned_vs_measured_spans import action_durations_ms, traced_steps
from meshwright.report.timeline.run_folder_reader import RunRecord
from meshwright.report.timeline.stage_actions import (
    gantt_rows,
    simulated_actions,
    stage_roles,
    traced_actions,
)

KIND_COLOURS = {
    "F": ("#93c5fd", "#3b82f6", "#1d4ed8"),
    "B": ("#6ee7b7", "#10b981", "#047857"),
    "I": ("#5eead4", "#14b8a6", "#0f766e"),
    "W": ("#c4b5fd", "#8b5cf6", "#6d28d9"),
    "~": ("#fbbf24",),
    ".": ("#fee2e2",),
}
MEMORY_COLOUR = "#ec4899"
LEFT, RIGHT, TOP, LEGEND = 70, 60, 26, 30  # pixels round the rows
ROW_HEIGHT, MEMORY_HEIGHT, ROW_GAP = 20, 14, 6  # heights of a row, and of what it holds
LETTER_WIDTH = 6.5  # the width of a letter in a label


def gantt_svg(
    schedules: Mapping[str, SpansByRank], width: int = 1100, units: DrawingUnits | None = None
) -> str:
    """Returns the `schedules`, such as planned and measured, as an SVG `width` pixels wide."""
    units = units or DrawingUnits()
    end = max((span.end for rows in schedules.values() for row in rows for span in row), default=0.0) or 1.0
    scale = (width - LEFT - RIGHT) / end
    body: list[str] = []
    y = 8.0
    for name, rows in schedules.items():
        body.append(_text(LEFT, y + 14, f"{name}: {schedule_summary(rows, units)}", weight="bold"))
        y += TOP
        most = max((span.memory for row in rows for span in row), default=0.0)
        for rank, row in enumerate(rows):
            body += _row(rank, row, y, scale, end, units)
            y += ROW_HEIGHT
            if most:
                body.append(_memory_curve(row, y, scale, most))
                body.append(
                    _text(
                        LEFT + end * scale + 4,
                        y + MEMORY_HEIGHT,
                        units.format_amount(max((s.memory for s in row), default=0.0)),
                    )
                )
                y += MEMORY_HEIGHT
            y += ROW_GAP
    body += _legend(schedules, y + 4)
    height = y + LEGEND
    frame = f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"'
    # the colours of the page around it, if it has some: a report may be dark
    look = 'font-family="system-ui, sans-serif" font-size="11" style="fill: var(--text, #27272a)"'
    ground = f'<rect width="{width}" height="{height:g}" style="fill: var(--card, white)"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {look}>{ground}{"".join(body)}</svg>\n'


def _row(
    rank: int, row: Sequence[TimelineSpan], y: float, scale: float, end: float, units: DrawingUnits
) -> Iterator[str]:
    yield _text(8, y + 14, f"{units.row_label} {rank}")
    yield (
        f'<rect x="{LEFT}" y="{y:g}" width="{end * scale:.2f}" height="{ROW_HEIGHT}" '
        f'fill="{KIND_COLOURS["."][0]}"/>'
    )
    for span in row:
        x, length = LEFT + span.begin * scale, (span.end - span.begin) * scale
        shades = KIND_COLOURS[span.kind]
        colour = shades[min(span.virtual_stage, len(shades) - 1)]
        box = f'x="{x:.2f}" y="{y:g}" width="{length:.2f}" height="{ROW_HEIGHT}" fill="{colour}"'
        title = f"<title>{escape(_title(span, units))}</title>"
        yield f'<rect {box} stroke="white" stroke-width="{0.5 if length > 4 else 0}">{title}</rect>'
        label = str(span.microbatch)
        if span.kind != "~" and len(label) * LETTER_WIDTH < length:
            ink = "white" if span.virtual_stage else "#18181b"
            yield _text(x + length / 2, y + 14, label, anchor="middle", ink=ink)


def _title(span: TimelineSpan, units: DrawingUnits) -> str:
    what = KIND_NAMES[span.kind]
    which = (
        ""
        if span.kind == "~"
        else f" of microbatch {span.microbatch}"
        + (f", virtual stage {span.virtual_stage}" if span.virtual_stage else "")
    )
    holds = f", {units.format_amount(span.memory)} of memory" if span.memory else ""
    return f"{what}{which}: {units.format_time(span.begin)} .. {units.format_time(span.end)}{holds}"


def _memory_curve(row: Sequence[TimelineSpan], y: float, scale: float, most: float) -> str:
    base = y + MEMORY_HEIGHT
    path = [f"M{LEFT} {base:g}"]
    for span in row:
        for amount, at in ((span.memory, span.begin), (span.memory_after, span.end)):
            path.append(f"H{LEFT + at * scale:.2f}V{base - amount / most * (MEMORY_HEIGHT - 1):.2f}")
    return f'<path d="{"".join(path)}V{base:g}Z" fill="{MEMORY_COLOUR}" fill-opacity="0.45"/>'


def _legend(parts: Mapping[str, SpansByRank], y: float) -> Iterator[str]:
    shown = {span.kind for rows in parts.values() for row in rows for span in row} | {"."}
    x = float(LEFT)
    for kind in (kind for kind in KIND_NAMES if kind in shown):
        yield f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{KIND_COLOURS[kind][0]}"/>'
        yield _text(x + 17, y + 10, KIND_NAMES[kind])
        x += 34 + LETTER_WIDTH * len(KIND_NAMES[kind])
    if any(span.memory for rows in parts.values() for row in rows for span in row):
        yield f'<rect x="{x:g}" y="{y:g}" width="12" height="12" fill="{MEMORY_COLOUR}" fill-opacity="0.45"/>'
        yield _text(x + 17, y + 10, "memory, and its peak")


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "", ink: str = "") -> str:
    more = (f' font-weight="{weight}"' if weight else "") + (f' fill="{ink}"' if ink else "")
    return f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


def schedule_svg(record: RunRecord) -> str:
    """Returns the SVG of a run, planned above measured; "" without a pipeline or without recorded stages."""
    program, parts = record.program, record.run_info.get("stages", [])
    if program is None or len(stage_roles(program)) < 2 or len(parts) < 2:
        return ""
    events, step = traced_steps(record)
    known = action_durations_ms(record, events) if step is not None else {}
    try:
        found: dict[str, SpansByRank] = {
            "planned": gantt_rows(simulated_actions(program, known), program, parts)
        }
    except SimulationDeadlock:  # a damaged file: such a list has been refused long before
        return ""
    if step is not None:
        found[f"measured, step {step}"] = gantt_rows(traced_actions(program, events, step), program, parts)
    long = "{:.4g} ms".format if known else (lambda flops: f"{flops:.4g} operations")
    return gantt_svg(found, units=DrawingUnits(long, format_nbytes, row_label(program)))
