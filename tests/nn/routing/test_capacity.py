"""Places of tokens in experts."""

import pytest
import torch

from meshwright.nn.routing.capacity import expert_capacity, places_in_experts


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "places"),
    [(10, 1, 1.1, 10), (100, 10, 1.1, 11), (7, 3, 1.0, 3), (7, 3, 1e-9, 1), (4, 2, 50.0, 4), (0, 3, 1.0, 0)],
)
def test_a_capacity_is_rounded_up_from_the_exact_product_and_at_most_all_tokens(
    tokens, experts, factor, places
):
    assert expert_capacity(tokens, experts, factor) == places


def test_tokens_are_served_in_order_or_by_priority_behind_what_is_taken():
    choices = torch.tensor([[0, 1, 0, 0]])
    places, counts = places_in_experts(choices, 3)
    assert places.tolist() == [[0, 0, 1, 2]]
    assert counts.tolist() == [[3, 1, 0]]
    priority = torch.tensor([[0.9, 0.5, 0.1, 0.3]])
    places, _ = places_in_experts(choices, 3, torch.tensor([[5, 7, 0]]), priority)
    assert places.tolist() == [[7, 7, 5, 6]]
