"""Draws into a tensor that is there: stochastic depth as many models write it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from meshwright.core.errors import PlanError
from tests.model.test_dropout import learnt, on, run


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (lambda x: torch.bernoulli(x.new_full((len(x), 1), 0.7)), lambda u: u < 0.7),
        (lambda x: x.new_full((len(x), 1), 0.7).bernoulli(), lambda u: u < 0.7),
        (lambda x: x.new_empty(len(x), 1).bernoulli_(0.7), lambda u: u < 0.7),
        (lambda x: x.new_empty(len(x), 1).uniform_(-2, 4), lambda u: u * 6 - 2),
        (lambda x: x.new_empty(len(x), 1).uniform_(to=3), lambda u: u * 3),
    ],
)
def test_draws_into_a_tensor_are_the_numbers_of_their_site(draw: Callable[..., torch.Tensor], of: Callable[..., torch.Tensor]):
    x, sites = torch.ones(5, 3), on("/0")
    one = run(sites, torch.arange(5), lambda: draw(x))
    assert torch.equal(one, of(run(sites, torch.arange(5), lambda: torch.rand(5, 1))).float())
    assert torch.equal(one[3:], run(sites, torch.arange(3, 5), lambda: draw(x[3:])))  # those samples, wherever they are
    assert len(one.unique()) > 1


def test_draws_by_numpy_are_refused_and_not_taken_for_a_fault_of_the_plan():
    with pytest.raises(PlanError, match=r"draws random numbers with numpy\.random.*\n.*apply_spec_augment=False"):
        learnt(lambda batch: torch.ones(batch, 3) * np.random.rand())
