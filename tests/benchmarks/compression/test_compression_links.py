"""Steps between hosts with codes and without: what is compared with what, and when the claim holds."""

from collections.abc import Mapping

import pytest

from benchmarks.compression.compression_links import FAST, INNER, SIDES, SLOW, make_strategy, result
from benchmarks.harness.interleaved_timing import Cost, Rounds


def rounds(walls: Mapping[str, float]) -> Rounds:
    """Rounds in which each side takes its seconds."""
    costs = {name: Cost(cpu_s=1.0, wall_s=wall) for name, wall in walls.items()}
    return Rounds((costs,) * 5, discarded=0, threshold=0.5)


def between_hosts(int8: float, powersgd: float) -> Rounds:
    """Rounds with one rank per host, where exact sums take 10 seconds."""
    codes = {"ddp powersgd": powersgd, "ddp powersgd, many buckets": 0.9, "ddp int8": int8}
    return rounds({"ddp": 10.0, "twin": 10.0, "torch ddp": 10.0, "torch ddp powersgd": 1.0, **codes})


@pytest.mark.parametrize(
    ("int8", "powersgd", "inner", "holds"),
    [(3.0, 0.9, 3.0, True), (3.5, 0.9, 3.0, False), (3.0, 1.1, 3.0, False), (3.0, 0.9, 4.0, False)],
)
def test_the_claim_holds_if_every_side_reaches_its_bar(
    int8: float, powersgd: float, inner: float, holds: bool
):
    found = {SLOW: between_hosts(int8, powersgd), FAST: between_hosts(5.0, 5.0)}
    within = {name: rounds({"exact": 10.0, "twin": 10.0, "int8": inner}) for name in INNER}
    verdict = result(found, within)
    assert verdict.holds is holds
    assert verdict.median == pytest.approx(10.0 / int8)


def test_sides_are_strategies_that_exist():
    for tables in (*SIDES.values(), *(strategies for _, strategies in INNER.values())):
        assert all(make_strategy(each).name == each["name"] for each in tables)
