"""A table as a value, shown in the terminal by rich, or on a page as HTML.

    Table(["kind", Column("sent", format_nbytes)], [("UNSHARD", 4096), ("REDUCE", 2048)])

    kind       sent                     <tr><th>kind</th><th class="number">sent</th></tr>
    UNSHARD   4 KiB                     <tr><td>UNSHARD</td><td class="number">4 KiB</td></tr> ...
    REDUCE    2 KiB

Texts are shown as they are: brackets are no markup of rich, and the page escapes them. In a narrow terminal
a cell continues on the next line, so nothing is cut off. It continues at a space: a word is broken only where
the words of all columns do not fit beside each other, and then in the column with the longest one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

COLUMN_GAP = 2  # spaces between two columns


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: the head; if no column has a name, the table has no row of heads.
        format: the format of a number, such as "{:.3g} ms" or a function; the column is right-aligned then.
            None: a column of texts.
        style: "bold", or "".
    """

    name: str = ""
    format: str | Callable[[Any], str] | None = None
    style: str = ""

    def cell(self, value: object) -> Text:
        """Returns `value` as text; None is an empty cell, and a Text keeps its own style."""
        if isinstance(value, Text):
            return value
        if value is None or self.format is None:
            return Text("" if value is None else str(value))
        return Text(self.format.format(value) if isinstance(self.format, str) else self.format(value))


@dataclass(frozen=True)
class Table:
    """Rows of values, one per column, with what is written around them.

    Attributes:
        columns: a str is a column of texts with this name.
        title: a line above the table, after an empty one; the terminal alone shows it.
        note: a line below the table.
        row_style: the style of a row in the terminal, such as "bold" or "yellow", by its values.
        max_rows: the rows that are shown; `more` says below how many others there are. None: all.
    """

    columns: Sequence[Column | str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""
    row_style: Callable[[Sequence[Any]], str] | None = None
    max_rows: int | None = None
    more: str = "and {} more"

    @classmethod
    def of_pairs(cls, values: Mapping[str, object] | Sequence[tuple[object, object]]) -> "Table":
        """Returns a table without heads: the keys in bold, beside their values."""
        pairs = list(values.items()) if isinstance(values, Mapping) else values
        return cls([Column(style="bold"), Column()], pairs)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the title, the table and the notes for the terminal."""
        columns, cells = self._columns(), self._cells()
        heads = any(column.name for column in columns)
        table = RichTable(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False, show_header=heads)
        for column, width in zip(columns, _widths(columns, cells, options.max_width), strict=True):
            table.add_column(
                Text(column.name),
                justify="right" if column.format else "left",
                overflow="fold",
                style=column.style,
                width=width,
            )
        for row, values in zip(cells, self.rows, strict=False):
            table.add_row(*row, style=self.row_style(values) if self.row_style else "")
        if self.title:
            yield Text(f"\n{self.title}", style="bold")
        yield table
        yield from (Text(note, style="dim") for note in self._notes())

    def html(self) -> str:
        """Returns the table as HTML, with the classes of the pages of this package: wide, number, note."""
        columns = self._columns()
        marks = [' class="number"' if column.format else "" for column in columns]

        def line(tag: str, texts: Sequence[str]) -> str:
            cells = zip(marks, texts, strict=True)
            return f"<tr>{''.join(f'<{tag}{mark}>{text}</{tag}>' for mark, text in cells)}</tr>"

        heads = [escape(column.name) for column in columns]
        rows = ([escape(cell.plain) for cell in row] for row in self._cells())
        bold = ["<b>{}</b>" if column.style else "{}" for column in columns]
        body = line("th", heads) if any(heads) else ""
        body += "".join(
            line("td", [f.format(text) for f, text in zip(bold, row, strict=True)]) for row in rows
        )
        notes = "".join(f'<p class="note">{escape(note)}</p>' for note in self._notes())
        return f'<div class="wide"><table>{body}</table></div>{notes}'

    def _columns(self) -> list[Column]:
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    def _cells(self) -> list[list[Text]]:
        columns = self._columns()
        return [
            [column.cell(value) for column, value in zip(columns, row, strict=True)]
            for row in self.rows[: self.max_rows]
        ]

    def _notes(self) -> list[str]:
        num_hidden = 0 if self.max_rows is None else len(self.rows) - self.max_rows
        return [
            *([self.more.format(num_hidden)] if num_hidden > 0 else []),
            *([self.note] if self.note else []),
        ]


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[Text]], max_width: int) -> list[int]:
    """The width of each column: that of its longest text, or if they do not fit, first that of its longest
    word, and then an equal share of the rest.
    """
    texts = [[column.name, *(row[number].plain for row in cells)] for number, column in enumerate(columns)]
    lines = [max(cell_len(line) for text in each for line in text.split("\n")) for each in texts]
    words = [max((cell_len(word) for text in each for word in text.split()), default=0) for each in texts]
    room = max(max_width - COLUMN_GAP * (len(columns) - 1), len(columns))
    widths = _fair_shares(words, room)
    more = _fair_shares([line - width for line, width in zip(lines, widths, strict=True)], room - sum(widths))
    return [max(1, width + extra) for width, extra in zip(widths, more, strict=True)]


def _fair_shares(wanted: Sequence[int], room: int) -> list[int]:
    """Shares `room`: those that want least get all they want, the others equal parts of the rest."""
    shares = [0] * len(wanted)
    for served, number in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[number] = min(wanted[number], room // (len(wanted) - served))
        room -= shares[number]
    return shares
