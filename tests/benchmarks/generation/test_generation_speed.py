"""The calls that are timed give the same answers, and the result is that of its worst row."""

from typing import Any

import pytest

from benchmarks.generation import generation_speed
from benchmarks.generation.generation_sides import (
    LONGEST,
    NEW_TOKENS,
    NUM_REQUESTS,
    SHORTEST,
    new_tokens_of,
    ours,
    ours_continuous,
    ours_in_fixed_batches,
    their_continuous,
    theirs,
)
from benchmarks.harness.interleaved_timing import Comparison, Interval
from benchmarks.harness.rank_processes import Ranks
from benchmarks.models.llama_steps import fresh_store


def answers_of(build: Any, num_ranks: int = 1, **arguments: Any) -> Any:
    """What the first rank of a side returns."""
    with Ranks("side", build, num_ranks, store=fresh_store(), **arguments) as ranks:
        return ranks.step().notes[0]


@pytest.mark.parametrize(
    ("mesh", "sizes"), [({}, {}), ({"pp": 2}, {"pp_size": 2}), ({"tp": 2}, {"tp_size": 2})]
)
def test_answers_are_those_of_transformers(mesh: dict[str, int], sizes: dict[str, int]):
    num_ranks, common = 2 if mesh else 1, {"num_prompts": 3, "model": "small"}
    found = answers_of(ours, num_ranks, mesh=mesh, **common)
    assert found == answers_of(theirs, num_ranks, sizes=sizes, **common)
    assert [len(each) for each in found] == [NEW_TOKENS] * 3


def test_requests_have_the_same_answers_in_any_batch():
    found = answers_of(ours_continuous, num_requests=3)
    assert [len(each) for each in found] == new_tokens_of(3)
    assert found == answers_of(ours_in_fixed_batches, num_requests=3)
    assert found == answers_of(their_continuous, num_requests=3)


def test_limits_are_spread_evenly():
    limits = new_tokens_of(NUM_REQUESTS)
    assert (min(limits), max(limits)) == (SHORTEST, LONGEST)
    assert len(set(limits)) == NUM_REQUESTS
    assert limits != sorted(limits)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0.5, 0.6, True), (0.5, 0.63, "unresolved"), (0.7, 0.8, False)]
)
def test_a_row_is_decided_where_noise_does_not_reach_across_its_bar(low: float, high: float, expected: Any):
    ratio, noise = Interval(0.6, low, high), Interval(1.0, 0.98, 1.05)
    found = Comparison("ours", "base", 0.65, (), ratio, noise)
    assert generation_speed.verdict(found) == expected


def test_bars_are_on_seconds():
    rows = generation_speed.rows()
    assert rows["tp 2"].speed == 1.3
    assert rows["copies beside one rank"].base.num_ranks == 1
    assert {row.ours.build for row in rows.values()} == {ours, ours_continuous}
