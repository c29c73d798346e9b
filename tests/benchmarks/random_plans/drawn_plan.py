"""The plans that are drawn for these tests, and what must become of each."""

from collections.abc import Callable

import pytest

from benchmarks.random_plans.combinations import reviewed
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import tried

LIMIT_S = 50.0  # less than a test has in all


def numbers(chosen: Callable[[Draw], bool]) -> list[int]:
    """The numbers of those draws that are chosen."""
    wanted = reviewed()
    return [number for number in range(wanted.count) if chosen(draw(wanted.seed, number))]


def matches_or_is_refused(number: int) -> None:
    """Fail unless the plan of that number equals one device, or is refused for a reason that is listed, with
    a repair.
    """
    seed = reviewed().seed
    row = tried(draw(seed, number), LIMIT_S)
    if row["outcome"] not in ("matched", "refused"):
        alone = f"python -m benchmarks.random_plans.random_plans --seed {seed} --only {number}"
        pytest.fail(f"{row['outcome']}: {row['case']}\n{row['said']}\nalone: {alone}", pytrace=False)
