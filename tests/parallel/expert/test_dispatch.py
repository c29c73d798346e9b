"""The shares of experts and of tokens that a rank gets."""

from itertools import combinations
from types import SimpleNamespace

import pytest

from meshwright.parallel.expert.dispatch import expected_rows, expert_ranges, reached_shares, weights_dtype


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(5, 3), (8, 2), (3, 3), (7, 4)])
def test_ranks_have_all_experts_in_order_the_first_one_more(num_experts: int, num_ranks: int):
    found = expert_ranges(num_experts, num_ranks)
    assert [each for first, end in found for each in range(first, end)] == list(range(num_experts))
    sizes = [end - first for first, end in found]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("num_experts", "top_k", "num_ranks"), [(5, 2, 3), (8, 2, 2), (6, 3, 3), (4, 4, 2)])
def test_expected_rows_are_the_mean_over_all_choices(num_experts: int, top_k: int, num_ranks: int):
    call = SimpleNamespace(num_experts=num_experts, top_k=top_k)
    choices = list(combinations(range(num_experts), top_k))
    ranges = expert_ranges(num_experts, num_ranks)
    reached = [
        sum(any(first <= each < end for each in choice) for choice in choices) / len(choices)
        for first, end in ranges
    ]
    assert reached_shares(call, num_ranks) == pytest.approx(reached)
    for rank in range(num_ranks):
        sent, received = expected_rows(call, 1000, num_ranks, rank)
        assert sent == round(1000 * (sum(reached) - reached[rank]))
        assert received == round(1000 * (num_ranks - 1) * reached[rank])


def test_weights_of_choices_travel_in_no_less_than_float32():
    assert [weights_dtype(each) for each in ("bfloat16", "float32", "float64")] == [
        "float32",
        "float32",
        "float64",
    ]
