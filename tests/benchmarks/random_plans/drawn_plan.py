"""The random plans of these tests, and the check that each one matches or is refused."""

from collections.abc import Callable

import pytest

from benchmarks.random_plans.combinations import reviewed
from benchmarks.random_plans.random_draws import Draw, draw
from benchmarks.random_plans.random_plans import try_plan

LIMIT_S = 50.0  # seconds; less than the time limit of a test


def numbers(chosen: Callable[[Draw], bool]) -> list[int]:
    """Returns the numbers of the random plans for which `chosen` is true."""
    wanted = reviewed()
    return [number for number in range(wanted.count) if chosen(draw(wanted.seed, number))]


def matches_or_is_refused(number: int) -> None:
    """Fails unless the plan of that number matches one device, or is refused for a listed reason, with a
    repair.
    """
    seed = reviewed().seed
    row = try_plan(draw(seed, number), LIMIT_S)
    if row["outcome"] not in ("matched", "refused"):
        alone = f"python -m benchmarks.random_plans.random_plans --seed {seed} --only {number}"
        pytest.fail(f"{row['outcome']}: {row['case']}\n{row['message']}\nalone: {alone}", pytrace=False)
