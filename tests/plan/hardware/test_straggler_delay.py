"""Straggler delay: the expected maximum over devices, and interpolation between measured lengths."""

import random
from itertools import pairwise
from statistics import fmean

import pytest

from meshwright.plan.hardware.straggler_delay import StragglerSample, expected_maximum, straggler_delay

MEASURED = (StragglerSample(0.01, 0.06), StragglerSample(0.04, 0.04), StragglerSample(0.16, 0.03))


def test_the_expected_largest_of_draws_is_that_of_the_tables():
    # H. L. Harter 1961, Expected values of normal order statistics, doi:10.1093/biomet/48.1-2.151, table 1
    for ranks, expected in ((2, 0.56419), (3, 0.84628), (4, 1.02938), (10, 1.53875), (100, 2.50759)):
        assert expected_maximum(ranks) == pytest.approx(expected, rel=1e-3)
    assert expected_maximum(1) == 0.0


def test_two_ranks_lose_the_measured_fraction_and_more_ranks_lose_more():
    assert straggler_delay(MEASURED, 0.04, 2) == pytest.approx(0.04 * 0.04)
    lost = [straggler_delay(MEASURED, 0.04, ranks) for ranks in (1, 2, 3, 4, 100)]
    assert lost[0] == 0.0
    assert all(low < high for low, high in pairwise(lost))
    assert straggler_delay((), 0.04, 8) == straggler_delay(MEASURED, 0.0, 8) == 0.0


def test_delays_are_interpolated_and_independent_beyond_the_longest():
    assert straggler_delay(MEASURED, 0.02, 2) == pytest.approx(0.02 * 0.05)
    assert straggler_delay(MEASURED, 0.001, 2) == pytest.approx(0.001 * 0.06)
    assert straggler_delay(MEASURED, 0.64, 2) == pytest.approx(0.64 * 0.015)


def test_it_equals_the_measured_delay_of_synchronizing_ranks():
    drawn, spread, length = random.Random(0), 0.05, 0.01
    share = spread * expected_maximum(2)  # half the mean distance of two
    for ranks in (2, 3, 6):
        waited = [
            max(drawn.gauss(length, spread * length) for _ in range(ranks)) - length for _ in range(20_000)
        ]
        assert fmean(waited) == pytest.approx(
            straggler_delay((StragglerSample(length, share),), length, ranks), rel=0.03
        )
