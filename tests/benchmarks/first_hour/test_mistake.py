"""The mistakes are complete data, and a change that changes nothing is refused."""

from pathlib import Path

import pytest

from benchmarks.first_hour.first_hour_mistakes import BAR, GROUPS
from benchmarks.first_hour.mistake import Mistake, read_mistakes, with_changes


def test_there_are_as_many_mistakes_as_claimed_and_none_twice():
    mistakes = read_mistakes()
    assert len(mistakes) >= BAR
    assert len({each.name for each in mistakes}) == len(mistakes)
    assert {each.group for each in mistakes} == set(GROUPS)


def test_every_mistake_is_changed_by_its_repair():
    for each in read_mistakes():
        assert each.change or each.write_after or each.replace_after, each.name
        assert each.repaired() != (each.run or each.script) or each.write_after or each.replace_after, (
            each.name
        )


def test_a_mistake_without_an_expected_repair_is_refused(tmp_path: Path):
    (tmp_path / "some_mistakes.toml").write_text("['a typo']\nrun = 'plan a'\nsays = ['x']\nrepair = ''\n")
    with pytest.raises(ValueError, match="'a typo' does not say which diagnosis and which repair"):
        read_mistakes(tmp_path)
    with pytest.raises(ValueError, match=r"'both' has run = 'plan' and a script"):
        Mistake("both", "some", ["x"], "y", run="plan", script="import x")


def test_words_that_are_not_there_cannot_be_changed():
    assert with_changes("plan x", [("x", "y"), ("y", "z")]) == "plan z"
    with pytest.raises(ValueError, match="'zebra' is not in"):
        with_changes("plan x", [("zebra", "b")])
