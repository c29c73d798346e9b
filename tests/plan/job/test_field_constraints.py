"""Constraints of fields: what each allows, and the diagnostic of a value that it does not allow."""

from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, Literal

import pytest

from meshwright.plan.job.field_constraints import (
    Metadata,
    above,
    at_least,
    below_one,
    field_diagnostics,
    in_range,
    not_empty,
    one_of,
    with_valid_fields,
    without_wrong_values,
)


@dataclass(frozen=True)
class Part:
    """A table in a table."""

    weight: float = field(default=1.0, metadata=above(0))


@dataclass(frozen=True)
class Table:
    """One field of each kind."""

    text: str = field(metadata=not_empty())
    size: int = field(default=4, metadata=at_least(1))
    share: float | None = field(default=None, metadata=in_range(0, 1, "write 0.5, say"))
    axis: str = field(default="rows", metadata=one_of("rows", "columns"))
    mode: Literal["", "fast", "slow"] = ""
    names: tuple[str, ...] = field(default=(), metadata=one_of("red", "green"))
    parts: tuple[Part, ...] = ()
    part: Part = field(default_factory=Part)
    count: int = 1


@pytest.mark.parametrize(
    ("metadata", "allowed", "wrong"),
    [
        (above(0), (0.1, 5), (0, -1.0, nan, inf)),
        (above(1, or_zero=True), (0, 1.1), (1, 0.5, -1, nan, inf)),
        (at_least(2), (2, 3.5), (1, nan, inf)),
        (in_range(0, 1), (0, 1), (-0.1, 1.1, nan)),
        (below_one(), (0, 0.99), (1, -0.1, nan)),
        (one_of(1, 2), (1, 2), (0, "1")),
        (not_empty(), ("a",), ("", " ")),
    ],
)
def test_a_constraint_allows_its_values_and_no_others(
    metadata: Metadata, allowed: tuple[Any, ...], wrong: tuple[Any, ...]
):
    allows = metadata["constraint"].allows
    assert all(allows(value) for value in allowed)
    assert not any(allows(value) for value in wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ""}, "job.text: text = ''; needed is a string that is not empty\n  repair: write a string"),
        (
            {"size": 0},
            "job.size: size = 0; needed is a whole number of at least 1\n  repair: write size = 4, the def",
        ),
        ({"size": 2.0}, "job.size: size = 2.0; needed is a whole number"),
        (
            {"size": True},
            "job.size: size = True; needed is a whole number of at least 1\n  repair: write size = 4",
        ),
        ({"share": 2.0}, "job.share: share = 2.0; needed is a number from 0 to 1\n  repair: write 0.5, say"),
        (
            {"axis": "row"},
            "job.axis: axis = 'row'; needed is 'rows' or 'columns'\n  repair: did you mean 'rows'?",
        ),
        (
            {"mode": "x"},
            "job.mode: mode = 'x'; needed is '', 'fast' or 'slow'\n  repair: choose one of: fast, slow",
        ),
        ({"names": ("red", "gren")}, "job.names: names contains 'gren'; needed is 'red' or 'green'\n"),
        ({"parts": (Part(), Part(-1.0))}, "job.parts.1.weight: weight = -1.0; needed is a number above 0\n"),
        ({"part": Part(nan)}, "job.part.weight: weight = nan"),
    ],
)
def test_a_wrong_value_names_its_field_what_is_needed_and_the_repair(changes: dict[str, Any], message: str):
    (diagnostic,) = field_diagnostics(Table(**{"text": "a", **changes}), "job")
    assert str(diagnostic).startswith(message)


def test_all_wrong_fields_are_found_and_none_is_allowed_where_the_type_says_so():
    assert list(field_diagnostics(Table("a"), "job")) == []
    wrong = Table("", size=0, axis="x", part=Part(0.0))
    places = [diagnostic.location for diagnostic in field_diagnostics(wrong, "job")]
    assert places == ["job.text", "job.size", "job.axis", "job.part.weight"]


def test_defaults_replace_wrong_values_and_a_field_without_one_keeps_its_value():
    assert with_valid_fields(Table("", size=0, share=0.3)) == Table("", size=4, share=0.3)
    valid = Table("a")
    assert with_valid_fields(valid) is valid


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": 3}, "job.text: text = 3; needed is a string\n  repair: write a string"),
        (
            {"share": "0.5"},
            "job.share: share = '0.5'; needed is a number\n  repair: write share = 0.5, without quotes",
        ),
        ({"count": True}, "job.count: count = True; needed is a whole number\n  repair: write count = 1"),
        ({"share": "half"}, "job.share: share = 'half'; needed is a number\n  repair: write share = None"),
        ({"names": "red"}, "job.names: names = 'red'; needed is a tuple\n  repair: write names = ('red',)"),
        (
            {"names": ["red", "green"]},
            "job.names: names = ['red', 'green']; needed is a tuple\n  repair: write",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_one_that_fits(changes: dict[str, Any], message: str):
    (diagnostic,) = field_diagnostics(Table(**{"text": "a", **changes}), "job")
    assert str(diagnostic).startswith(message)


def test_wrong_values_are_taken_out_with_their_diagnostics_and_those_of_a_wrong_type_stay():
    given = {"text": "", "size": 0, "axis": 3, "names": ["blue"], "other": 1}
    kept, wrong = without_wrong_values(Table, given, "job")
    assert kept == {"axis": 3, "other": 1}
    assert [each.location for each in wrong] == ["job.text", "job.size", "job.names"]
