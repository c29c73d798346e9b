"""The shares of experts and of tokens that a rank gets."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from meshwright.parallel.expert.dispatch import ExpertPlaces, expected_rows, reached_shares, weights_dtype
from meshwright.plan.sharding.expert_load import expert_ranges


@pytest.mark.parametrize(("num_experts", "top_k", "num_ranks"), [(5, 2, 3), (8, 2, 2), (6, 3, 3), (4, 4, 2)])
def test_expected_rows_are_the_mean_over_all_choices(num_experts: int, top_k: int, num_ranks: int):
    call = SimpleNamespace(num_experts=num_experts, top_k=top_k)
    choices = list(combinations(range(num_experts), top_k))
    ranges = expert_ranges(num_experts, num_ranks)
    reached = [
        sum(any(first <= each < end for each in choice) for choice in choices) / len(choices)
        for first, end in ranges
    ]
    places = ExpertPlaces(num_experts, num_ranks)
    assert reached_shares(call, places) == pytest.approx(reached)
    for rank in range(num_ranks):
        sent, received = expected_rows(call, places, [1000] * num_ranks, rank)
        assert sent == round(1000 * (sum(reached) - reached[rank]))
        assert received == round(1000 * (num_ranks - 1) * reached[rank])


def test_weights_of_choices_travel_in_no_less_than_float32():
    assert [weights_dtype(each) for each in ("bfloat16", "float32", "float64")] == [
        "float32",
        "float32",
        "float64",
    ]
