"""Formats of files: a file of another format or version is refused with what was found and the repair."""

import pytest

from meshwright.plan.job import file_format
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.file_format import PLAN, FileFormat

NOTES = FileFormat("notes", 3, "write them again")
FORMATS = [each for each in vars(file_format).values() if isinstance(each, FileFormat)]


def test_a_file_with_the_header_is_read_without_it():
    assert NOTES.header == {"format": "notes", "version": 3}
    assert NOTES.contents({**NOTES.header, "a": 1}, "notes.json") == {"a": 1}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (None, "it names no format and version; needed are 'notes', version 3"),
        ([1], "it names no format and version; needed are 'notes', version 3"),
        ({"format": "notes"}, "it names no format and version; needed are 'notes', version 3"),
        ({"format": "songs", "version": 3}, "its format is 'songs'; needed is 'notes'"),
        ({"format": 7, "version": 3}, "its format is 7; needed is 'notes'"),
        ({"format": "notes", "version": 4}, "its version is 4; this meshwright reads version 3 of it"),
        ({"format": "notes", "version": 2}, "its version is 2; this meshwright reads version 3 of it"),
        ({"format": "notes", "version": "3"}, "its version is '3'; this meshwright reads version 3 of it"),
        ({"format": "notes", "version": True}, "its version is True; this meshwright reads version 3 of it"),
    ],
)
def test_any_other_file_is_refused_by_name(document: object, problem: str):
    with pytest.raises(PlanError) as raised:
        NOTES.contents(document, "notes.json")
    (diagnostic,) = raised.value.diagnostics
    assert (diagnostic.location, diagnostic.problem) == ("notes.json", problem)
    assert diagnostic.fix == "write them again"


def test_no_two_formats_have_one_name_and_each_has_a_repair():
    assert PLAN in FORMATS
    assert len({each.name for each in FORMATS}) == len(FORMATS)
    assert all(each.fix and each.version >= 1 for each in FORMATS)
