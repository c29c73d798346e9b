"""A schedule drawn as text: a row per rank, a cell per unit of time, what is held below; planned above measured, on one scale.

    rank 0   F0 F1 F2 .  .  B0--- F3 B1--- ...      F forward, B backward, I and W its halves; lower case: a rank's second part
    rank 1   .  F0 F1 B0---          ...            . the rank waits     ~ it waits for what is on its way
    held     1  2  3  3  3  3     3  ...            as bars; the peak stands at the end

What is drawn are spans (core/spans.py), from whatever clock: of a schedule on paper, or of one that ran.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.core.spans import Rows, Span

STYLES = {"F": "black on #93c5fd", "B": "black on #6ee7b7", "I": "black on #5eead4", "W": "black on #c4b5fd"}
STYLES |= {"~": "black on #fbbf24", ".": "#dc2626"}
MEANINGS = {"F": "forward", "B": "backward", "I": "of inputs", "W": "of weights", "~": "exposed communication", ".": "bubble"}
LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


def order_view(parts: Mapping[str, Rows], width: int = 120) -> RenderableType:
    """The `parts`, such as planned and measured, below each other on one scale of at most `width` columns, and a legend."""
    end = max((span.end for rows in parts.values() for row in rows for span in row), default=0.0)
    scale = _scale(list(parts.values()), end, width - 9)
    lines: list[RenderableType] = []
    for name, rows in parts.items():
        lines += [Text(f"{name}: {words(rows)}", style="bold"), *_drawn(rows, end, scale), Text("")]
    legend = Text()
    shown = {span.kind for rows in parts.values() for row in rows for span in row} | {"."}
    for kind in (kind for kind in MEANINGS if kind in shown):
        legend.append(f" {kind} ", STYLES[kind]).append(f" {MEANINGS[kind]}   ")
    return Group(*lines, legend)


def words(rows: Rows) -> str:
    """How long it takes, what share of it is bubble, and the most that a rank holds."""
    end = max((span.end for row in rows for span in row), default=0.0)
    busy = sum(span.end - span.begin for row in rows for span in row if span.kind != "~")
    bubble = 1 - busy / (end * len(rows)) if end else 0.0
    most = max((span.held for row in rows for span in row), default=0.0)
    return f"{end:.4g} long, bubble {100 * bubble:.2f} %" + (f", at most {most:.4g} held" if most else "")


def _scale(parts: Sequence[Rows], end: float, columns: int) -> float:
    """Characters per unit of time: as many as the label of the shortest act needs, or as all `columns` allow."""
    spans = [span for rows in parts for row in rows for span in row]
    shortest = min((span.end - span.begin for span in spans if span.end > span.begin and span.kind != "~"), default=1.0)
    label = max((len(span.label) for span in spans), default=1) + 1
    wanted = label / shortest
    return wanted if end * wanted <= columns else columns / end


def _drawn(rows: Rows, end: float, scale: float) -> Iterator[Text]:
    """A line per rank, then a line of what each holds, where anything is said about it."""
    width = round(end * scale)
    for rank, row in enumerate(rows):
        line = Text().append(f"rank {rank:<4}", "bold")
        at = 0
        for span in row:
            begin, until = round(span.begin * scale), round(span.end * scale)
            line.append("." * max(begin - at, 0), STYLES["."])
            if until > begin:
                line.append(_cell(span, until - begin), STYLES[span.kind])
            at = max(at, until)
        yield line.append("." * (width - at), STYLES["."])
    most = max((span.held for row in rows for span in row), default=0.0)
    for rank, row in enumerate(rows if most else ()):
        line = Text().append(f"held {rank:<4}", "bold").append(_bars(row, end, scale, most), "#ec4899")
        yield line.append(f" {max((span.held for span in row), default=0.0):.4g}")


def _cell(span: Span, width: int) -> str:
    """The label of an act in `width` characters: its end is left open, so that neighbours are told apart."""
    if span.kind == "~":
        return "~" * width
    label = span.label if len(span.label) < width or width == len(span.label) else span.label[0]
    filled = label + "-" * (width - len(label))
    return filled if width <= len(label) else f"{filled[:-1]} "


def _bars(row: Sequence[Span], end: float, scale: float, most: float) -> str:
    """What is held at each place, in eighths of the `most` that any rank holds."""
    text = " " * round(row[0].begin * scale) if row else ""
    for span, following in pairwise([*row, Span(".", end, end)]):
        for amount, until in ((span.held, span.end), (span.left, following.begin)):
            level = ceil(amount / most * (len(LEVELS) - 1) - 1e-9)
            text += LEVELS[level] * (round(until * scale) - len(text))
    return text
