"""A table: formats of columns, notes, hidden rows; the terminal and the page show the same texts."""

import re
from html import unescape
from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from meshwright.plan.job.errors import format_nbytes
from meshwright.report.table import Column, Table

SENT = Table(
    ["kind", Column("sent", format_nbytes), Column("share", "{:.0f} %")],
    [("UNSHARD", 4096, 66.7), ("[red]REDUCE", None, 33.3), ("<b>", 0, None)],
    note="of [one] rank",
)


def shown(table: Table, width: int = 80) -> list[str]:
    console = Console(width=width, color_system=None, file=StringIO())
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_numbers_are_on_the_right_in_their_format_and_none_is_empty():
    assert shown(SENT) == [
        "kind          sent  share",
        "UNSHARD      4 KiB   67 %",
        "[red]REDUCE          33 %",
        "<b>            0 B",
        "of [one] rank",
    ]


def test_the_page_has_the_texts_of_the_terminal_and_escapes_them():
    html = SENT.html()
    assert '<tr><th>kind</th><th class="number">sent</th><th class="number">share</th></tr>' in html
    assert '<tr><td>UNSHARD</td><td class="number">4 KiB</td><td class="number">67 %</td></tr>' in html
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    words = unescape(re.sub(r"<[^>]*>", " ", html)).split()
    assert words == " ".join(shown(SENT)).split()


def test_pairs_have_no_heads_and_their_keys_are_bold():
    table = Table.of_pairs({"mesh": "tp 2", "plan": Text("abc", style="yellow")})
    assert shown(table) == ["mesh  tp 2", "plan  abc"]
    assert "<th>" not in table.html()
    assert "<tr><td><b>mesh</b></td><td>tp 2</td></tr>" in table.html()


@pytest.mark.parametrize(("max_rows", "lines"), [(None, 4), (3, 4), (2, 4), (1, 3)])
def test_hidden_rows_are_counted_below_the_others(max_rows: int | None, lines: int):
    table = Table(["x"], [(row,) for row in range(3)], max_rows=max_rows, more="and {} more rows")
    text = shown(table)
    assert len(text) == lines
    hidden = 0 if max_rows is None else 3 - max_rows
    assert (f"and {hidden} more rows" in text) == (hidden > 0)
    assert (f'<p class="note">and {hidden} more rows</p>' in table.html()) == (hidden > 0)


def test_a_title_comes_after_an_empty_line_and_rows_have_a_style_by_their_values():
    table = Table(["x"], [("a",), ("total",)], title="sums", row_style=lambda row: "bold" * (row[0] != "a"))
    assert shown(table)[:3] == ["", "sums", "x"]
    console = Console(force_terminal=True, color_system="standard", file=StringIO(), width=20)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    assert "\x1b[1m" not in lines[3]
    assert "\x1b[1m" in lines[4]


def test_a_cell_that_is_too_long_continues_on_the_next_line():
    text = shown(Table(["name", Column("n", "{}")], [("x" * 50, 7)]), width=30)
    assert "".join(text).count("x") == 50
    assert max(map(len, text)) <= 30


def test_a_row_has_a_value_for_every_column():
    with pytest.raises(ValueError, match="zip"):
        Table(["a", "b"], [("x",)]).html()


def test_lines_are_broken_between_words_where_words_fit_beside_each_other():
    """The widest column is not the one with the longest word."""
    table = Table(
        ["action", "what happens", "waits"],
        [("UNSHARD model.language_model.layers.10.mlp", "gathers " * 12, "F(model.language_model.norm)")],
    )
    lines = shown(table, 76)
    assert max(map(len, lines)) <= 76
    found = " ".join(lines).split()
    assert "model.language_model.layers.10.mlp" in found
    assert "F(model.language_model.norm)" in found
    assert found.count("gathers") == 12


def test_the_longest_words_are_broken_where_they_do_not_fit():
    lines = shown(Table(["a", "b"], [("x" * 30, "y" * 8)]), 20)
    assert max(map(len, lines)) <= 20
    assert "y" * 8 in " ".join(lines).split()
    assert "".join(lines).count("x") == 30


@pytest.mark.parametrize("width", [7, 10, 25, 60])
def test_no_letter_is_lost_in_any_width(width: int):
    table = Table(["kind", Column("sent", "{}"), "what"], [("alpha beta", 12345, "gamma delta epsilon")])
    letters = "".join("".join(shown(table, width)).split())
    assert sorted(letters) == sorted("kindsentwhatalphabeta12345gammadeltaepsilon")
