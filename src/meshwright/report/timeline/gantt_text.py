"""A schedule drawn as text: a row per rank, a cell per unit of time, what is held below; planned above
measured, on one scale.

    rank 0   F0 F1 F2 .  .  B0--- F3 B1--- ...      F forward, B backward, I and W its halves; lower case: a
                                                    rank's second part
    rank 1   .  F0 F1 B0---          ...            . the rank waits     ~ it waits for what is on its way
    held     1  2  3  3  3  3     3  ...            as bars; the peak stands at the end

What is drawn are spans (core/spans.py), from whatever clock: of a schedule on paper, or of one that ran.
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
    "I": "of inputs",
    "W": "of weights",
    "~": "exposed communication",
    ".": "bubble",
}
MAX_RANKS_DRAWN = 8  # ranks that are drawn, unless all are
UNLIMITED_COLUMNS = 10**9  # columns
LabelledLine = tuple[str, Text, str]  # whose it is, what is drawn, what is said behind it
BAR_LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@dataclass(frozen=True)
class DrawingUnits:
    """How times and amounts are said: `long` and `much` put a number into words.

    `rank` is what a row is called.
    """

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
    """The `parts`, such as planned and measured, below each other on one scale of at most `width` columns,
    and a legend.

    Of many ranks the first and the last are drawn; `whole` draws all, every act with its label, in as many
    pieces as it needs.
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
            [Text(f"{len(rows) - len(shown)} {units.row_label}s between them do likewise")]
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
    """How long it takes, what share of it is bubble, and the most that a rank holds."""
    units = units or DrawingUnits()
    end = max((span.end for row in rows for span in row), default=0.0)
    busy = sum(span.end - span.begin for row in rows for span in row if span.kind != "~")
    bubble = 1 - busy / (end * len(rows)) if end else 0.0
    most = max((span.memory for row in rows for span in row), default=0.0)
    return f"{units.format_time(end)} long, bubble {100 * bubble:.2f} %" + (
        f", at most {units.format_amount(most)} held" if most else ""
    )


def _scale(parts: Sequence[SpansByRank], end: float, columns: int) -> float:
    """Characters per unit of time: as many as the label of the shortest act needs,
    or as all `columns` allow.
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
    """A line per rank, then a line of what each holds, where anything is said about it."""
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
            _label("held", rank, units),
            line,
            f" {units.format_amount(max((span.memory for span in row), default=0.0))}",
        )


def _wrapped_lines(lines: Sequence[LabelledLine], columns: int, width: int) -> Iterator[Text]:
    """The lines with their labels, in pieces of `columns` below each other; what is said behind a line stands
    behind its last.
    """
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
    """The label of an act in `width` characters: its end is left open, so that neighbours are told apart."""
    if span.kind == "~":
        return "~" * width
    label = span.label if len(span.label) < width or width == len(span.label) else span.label[0]
    filled = label + "-" * (width - len(label))
    return filled if width <= len(label) else f"{filled[:-1]} "


def _memory_bars(row: Sequence[TimelineSpan], end: float, scale: float, most: float) -> str:
    """What is held at each place, in eighths of the `most` that any rank holds."""
    text = " " * round(row[0].begin * scale) if row else ""
    for span, following in pairwise([*row, TimelineSpan(".", end, end)]):
        for amount, until in ((span.memory, span.end), (span.memory_after, following.begin)):
            level = ceil(amount / most * (len(BAR_LEVELS) - 1) - 1e-9)
            text += BAR_LEVELS[level] * (round(until * scale) - len(text))
    return text
