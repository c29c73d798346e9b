"""Draws a schedule as text: a row per rank, a cell per unit of time, memory below.

Planned above measured, on one scale.

    rank 0   F0 F1 F2 .  .  B0--- F3 B1--- ...      F forward, B backward, I and W its halves;
                                                    lower case: the second virtual stage of a rank
    rank 1   .  F0 F1 B0---          ...            . the rank waits; ~ it waits for a message in flight
    mem  0   1  2  3  3  3  3     3  ...            memory as bars; the peak is at the end

The input is a list of spans per rank (plan/step/simulator.py), of a simulated schedule or of a real run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.plan.step.simulator import SpansByRank, TimelineSpan

KIND_STYLES = {
    "F": "black on #93c5fd",
    "B": "black on #6ee7b7",
    "I": "black on #5eead4",
    "W": "black on #c4b5fd",
}
KIND_STYLES |= {"~": "black on #fbbf24", ".": "#dc2626"}
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "~": "exposed communication",
    ".": "bubble",
}
MAX_RANKS_DRAWN = 8  # ranks that are drawn, unless all are
UNLIMITED_COLUMNS = 10**9  # columns
LabelledLine = tuple[str, Text, str]  # label, drawing, text at the end of the line
BAR_LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@dataclass(frozen=True)
class DrawingUnits:
    """The format of times and amounts. `row_label` is the name of a row."""

    format_time: Callable[[float], str] = "{:.4g}".format
    format_amount: Callable[[float], str] = "{:.4g}".format
    row_label: str = "rank"


def gantt_view(
    schedules: Mapping[str, SpansByRank],
    width: int = 120,
    units: DrawingUnits | None = None,
    *,
    draw_all: bool = False,
) -> RenderableType:
    """Returns the `schedules` below each other on one scale of at most `width` columns, and a legend.

    Of many ranks the first and the last are drawn; `draw_all` draws all, every action with its label, wrapped
    as needed.
    """
    units = units or DrawingUnits()
    end = max((span.end for rows in schedules.values() for row in rows for span in row), default=0.0)
    columns = width - len(_label("rank", 0, units))
    scale = _scale(list(schedules.values()), end, UNLIMITED_COLUMNS if draw_all else columns)
    lines: list[RenderableType] = []
    for name, rows in schedules.items():
        shown = (
            range(len(rows))
            if draw_all or len(rows) <= MAX_RANKS_DRAWN
            else (*range(MAX_RANKS_DRAWN // 2), *range(len(rows) - MAX_RANKS_DRAWN // 2, len(rows)))
        )
        lines.append(Text(f"{name}: {schedule_summary(rows, units)}", style="bold"))
        lines += _wrapped_lines(
            list(_rank_lines(rows, shown, end, scale, units)), columns, round(end * scale)
        )
        lines += (
            [Text(f"{len(rows) - len(shown)} {units.row_label}s between them are not drawn")]
            if len(shown) < len(rows)
            else []
        )
        lines.append(Text(""))
    legend = Text()
    shown = {span.kind for rows in schedules.values() for row in rows for span in row} | {"."}
    for kind in (kind for kind in KIND_NAMES if kind in shown):
        legend.append(f" {kind} ", KIND_STYLES[kind]).append(f" {KIND_NAMES[kind]}   ")
    return Group(*lines, legend)


def schedule_summary(rows: SpansByRank, units: DrawingUnits | None = None) -> str:
    """Returns the duration, the bubble, and the most memory of a rank, as text."""
    units = units or DrawingUnits()
    end = max((span.end for row in rows for span in row), default=0.0)
    busy = sum(span.end - span.begin for row in rows for span in row if span.kind != "~")
    bubble = 1 - busy / (end * len(rows)) if end else 0.0
    most = max((span.memory for row in rows for span in row), default=0.0)
    return f"{units.format_time(end)} long, bubble {100 * bubble:.2f} %" + (
        f", peak memory {units.format_amount(most)}" if most else ""
    )


def _scale(parts: Sequence[SpansByRank], end: float, columns: int) -> float:
    """Characters per unit of time.

    As many as the label of the shortest action needs, or as all `columns` allow.
    """
    spans = [span for rows in parts for row in rows for span in row]
    shortest = min(
        (span.end - span.begin for span in spans if span.end > span.begin and span.kind != "~"), default=1.0
    )
    label = max((len(span.label) for span in spans), default=1) + 1
    wanted = label / shortest
    return wanted if end * wanted <= columns else columns / end


def _label(word: str, rank: int, units: DrawingUnits) -> str:
    return f"{word:<{len(units.row_label)}} {rank:<4}"


def _rank_lines(
    rows: SpansByRank, shown: Sequence[int], end: float, scale: float, units: DrawingUnits
) -> Iterator[LabelledLine]:
    width = round(end * scale)
    for rank, row in ((rank, rows[rank]) for rank in shown):
        line, at = Text(), 0
        for span in row:
            begin, until = round(span.begin * scale), round(span.end * scale)
            line.append("." * max(begin - at, 0), KIND_STYLES["."])
            if until > begin:
                line.append(_span_text(span, until - begin), KIND_STYLES[span.kind])
            at = max(at, until)
        yield _label(units.row_label, rank, units), line.append("." * (width - at), KIND_STYLES["."]), ""
    most = max((span.memory for row in rows for span in row), default=0.0)
    for rank, row in ((rank, rows[rank]) for rank in (shown if most else ())):
        line = Text(_memory_bars(row, end, scale, most), "#ec4899")
        yield (
            _label("mem", rank, units),
            line,
            f" {units.format_amount(max((span.memory for span in row), default=0.0))}",
        )


def _wrapped_lines(lines: Sequence[LabelledLine], columns: int, width: int) -> Iterator[Text]:
    for begin in range(0, max(width, 1), columns):
        for label, line, behind in lines:
            last = begin + columns >= width
            yield (
                Text()
                .append(label, "bold")
                .append(line[begin : begin + columns])
                .append(behind if last else "")
            )


def _span_text(span: TimelineSpan, width: int) -> str:
    if span.kind == "~":
        return "~" * width
    label = span.label if len(span.label) < width or width == len(span.label) else span.label[0]
    filled = label + "-" * (width - len(label))
    return filled if width <= len(label) else f"{filled[:-1]} "


def _memory_bars(row: Sequence[TimelineSpan], end: float, scale: float, most: float) -> str:
    text = " " * round(row[0].begin * scale) if row else ""
    for span, following in pairwise([*row, TimelineSpan(".", end, end)]):
        for amount, until in ((span.memory, span.end), (span.memory_after, following.begin)):
            level = ceil(amount / most * (len(BAR_LEVELS) - 1) - 1e-9)
            text += BAR_LEVELS[level] * (round(until * scale) - len(text))
    return text
