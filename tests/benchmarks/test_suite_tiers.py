"""The selection of cases, on made-up seconds."""

from benchmarks.suite_tiers import Case, Tiers, selection

SLOW, CHEAP, ABSENT = "a.py", "b.py", "c.py"
NAMES = ("a-c", "a-d", "b-c", "b-d")
CASES: list[Case] = [(file, "test_it", name) for file in (SLOW, CHEAP, ABSENT) for name in NAMES]
SECONDS = {case: {SLOW: 0.15, CHEAP: 0.01}[case[0]] for case in CASES if case[0] != ABSENT}


def test_an_expensive_function_keeps_what_covers_its_words_within_the_budget():
    found = selection(CASES, SECONDS, {}, adds=False)
    assert found == {SLOW: {"test_it": ["a-c", "b-d"]}}


def test_what_is_added_leaves_selections_and_what_has_not_run_alone():
    before: Tiers = {SLOW: {"test_it": ["a-d", "gone"]}}
    found = selection(CASES, SECONDS, before, adds=True)
    assert found == {SLOW: {"test_it": ["a-d"]}}
    renamed: Tiers = {SLOW: {"test_it": ["gone"]}}
    assert selection(CASES, SECONDS, renamed, adds=True) == {SLOW: {"test_it": ["a-c", "b-d"]}}
    slower = {case: 10 * spent for case, spent in SECONDS.items()}
    assert set(selection(CASES, slower, before, adds=True)) == {SLOW, CHEAP}


def test_a_function_whose_cheapest_case_is_too_slow_is_left_out():
    found = selection(CASES[:1], {CASES[0]: 2.5}, {}, adds=False)
    assert found == {SLOW: {"test_it": []}}
