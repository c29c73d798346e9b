"""The verdict for a bar that is a small fraction of gloo's time, although that time scatters."""

import pytest

from benchmarks.comm.shared_memory import verdict
from benchmarks.harness.interleaved_timing import Comparison, Interval


@pytest.mark.parametrize(
    ("median", "noise", "holds"),
    [
        (0.05, 0.2, True),
        (0.095, 0.2, "unresolved"),
        (0.095, 0.01, True),
        (0.2, 0.2, False),
        (0.105, 0.2, "unresolved"),
    ],
)
def test_a_bar_far_beyond_the_noise_is_decided_and_one_within_it_is_not(
    median: float, noise: float, holds: bool | str
) -> None:
    ratio = Interval(median, median * 0.99, median * 1.01)
    found = Comparison("memory", "gloo", 0.1, (median,) * 20, ratio, Interval(1.0, 1 - noise, 1 + noise))
    assert verdict(found) == holds


def test_too_few_rounds_are_unresolved() -> None:
    found = Comparison(
        "memory", "gloo", 0.1, (0.01,) * 14, Interval(0.01, 0.01, 0.01), Interval(1.0, 0.99, 1.01)
    )
    assert verdict(found) == "unresolved"
