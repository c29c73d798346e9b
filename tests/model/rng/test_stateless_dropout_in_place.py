"""In-place draws into an existing tensor, as many models write stochastic depth."""

from collections.abc import Callable

import pytest
import torch

from tests.model.rng.test_stateless_dropout import on, run


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (lambda x: torch.bernoulli(x.new_full((len(x), 1), 0.7)), lambda u: u < 0.7),
        (lambda x: x.new_full((len(x), 1), 0.7).bernoulli(), lambda u: u < 0.7),
        (lambda x: x.new_empty(len(x), 1).bernoulli_(0.7), lambda u: u < 0.7),
        (lambda x: x.new_empty(len(x), 1).uniform_(-2, 4), lambda u: u * 6 - 2),
        (lambda x: x.new_empty(len(x), 1).uniform_(to=3), lambda u: u * 3),
        (lambda x: x.new_empty(len(x), 1).exponential_(2), lambda u: -(1 - u).log() / 2),
    ],
)
def test_draws_into_a_tensor_are_the_numbers_of_their_site(
    draw: Callable[..., torch.Tensor], of: Callable[..., torch.Tensor]
):
    x, sites = torch.ones(5, 3), on("/0")
    one = run(sites, torch.arange(5), lambda: draw(x))
    assert torch.equal(one, of(run(sites, torch.arange(5), lambda: torch.rand(5, 1))).float())
    assert torch.equal(
        one[3:], run(sites, torch.arange(3, 5), lambda: draw(x[3:]))
    )  # those samples, wherever they are
    assert len(one.unique()) > 1
