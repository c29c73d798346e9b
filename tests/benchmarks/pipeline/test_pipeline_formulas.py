"""The closed forms on small numbers computed by hand, and every law on a few of its cases."""

import pytest

from benchmarks.pipeline.pipeline_formulas import LAWS, Case, Law, cases, compare_case, distance, result
from meshwright.parallel.pipeline.schedules import gpipe

BY_NAME = {law.name: law for law in LAWS}


def test_the_forms_by_hand():
    case = Case(4, 8, 1, (1, 1, 1))
    stated = {name: law.bubble(case) for name, law in BY_NAME.items() if law.bubble}
    assert stated["GPipe"] == stated["1F1B"] == 9
    assert stated["ZB-H1"] == 3
    assert stated["ZB-H2"] == 0
    assert stated["model parallel"] == 72
    assert stated["V-Half"] == 4.5
    assert stated["V-Min"] == 6
    assert stated["DualPipe"] == 1
    half = Case(4, 8, 2, (1, 1, 1))
    assert BY_NAME["interleaved"].bubble(half) == 4.5
    assert BY_NAME["interleaved"].peak(half) == 4 * (1 + 3 / 8)
    assert BY_NAME["ZB-H2"].peak(case) == 7


@pytest.mark.parametrize("name", BY_NAME)
def test_every_schedule_agrees_with_its_law(name: str):
    law = BY_NAME[name]
    chosen = [case for case in cases(law) if case.p <= 4]
    assert chosen
    for case in chosen[:: max(1, len(chosen) // 8)]:
        assert compare_case(law, case)["off"] == 0.0


def test_a_bubble_or_a_peak_that_is_slightly_off_is_noticed():
    case = Case(4, 8, 1, (12, 12, 12))
    right = Law(
        "right", lambda c: gpipe.gpipe_schedule(c.p, c.m), lambda c: (c.p - 1) * c.total, lambda c: c.m
    )
    slow = Law("slow", right.make, lambda c: (c.p - 1) * c.total - 0.01, right.peak)
    full = Law("full", right.make, right.bubble, lambda c: c.m - 1)
    zero = Law("zero", right.make, None, right.peak)
    rows = [compare_case(law, case) for law in (right, slow, full, zero)]
    assert [row["off"] > 0 for row in rows] == [False, True, True, True]
    assert result(rows[:1]).holds is True
    assert result(rows).holds is False


def test_only_values_above_an_upper_bound_are_off():
    assert distance(1.0, 2.0, exact=False) == 0.0
    assert distance(1.0, 2.0, exact=True) == 0.5
    assert distance(3.0, 2.0, exact=False) == 0.5
