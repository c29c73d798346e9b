"""Muon against the same polynomial on singular values, its bounds, and its result on shards."""

import pytest
import torch

from meshwright.engine.optim.muon import Muon, orthogonalize
from meshwright.plan.job.errors import PlanError
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes
from tests.engine.optim.known_gradients import DECAY, LR, gradients, groups, moments, stepped, weight

SHAPES = [(7, 5), (5, 7), (6, 6), (1, 4)]


def polished(matrix: torch.Tensor) -> torch.Tensor:
    """U p(p(p(p(p(S / |S|))))) V' by a singular value decomposition, p being the paper's quintic."""
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


def plain(begin: torch.Tensor, grads: list[torch.Tensor], mu: float = 0.95) -> torch.Tensor:
    x, m = begin.clone(), torch.zeros_like(begin)
    for g in grads:
        m = mu * m + (1 - mu) * g
        update = polished(mu * m + (1 - mu) * g)
        x = x - LR * DECAY * x - LR * 0.2 * max(x.shape) ** 0.5 * update
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_polynomial_on_singular_values(shape: tuple[int, int]):
    begin, grads = weight(*shape), gradients(*shape)
    assert (stepped(Muon, begin, grads)[0] - plain(begin, grads)).abs().max() < 1e-12


def test_each_expert_is_a_matrix():
    begin, grads = weight(3 * 7, 5).view(3, 7, 5), [each.view(3, 7, 5) for each in gradients(3 * 7, 5)]
    found, _ = stepped(Muon, begin, grads)
    for expert in range(3):
        assert (found[expert] - plain(begin[expert], [each[expert] for each in grads])).abs().max() < 1e-12


def test_every_direction_moves_about_equally():
    values = torch.linalg.svdvals(orthogonalize(weight(40, 60)))
    assert 0.65 < values.min() < values.max() < 1.25


def test_an_update_is_as_large_as_one_of_adamw():
    for shape in [(40, 60), (200, 50)]:
        begin, grads = torch.zeros(*shape, dtype=torch.float64), gradients(*shape, steps=1)
        way, _ = stepped(Muon, begin, grads)
        assert 0.1 * LR < way.square().mean().sqrt() < 0.3 * LR


def test_it_keeps_four_bytes_per_parameter():
    _, optimizer = stepped(Muon, weight(7, 5, dtype=torch.float32), gradients(7, 5, dtype=torch.float32))
    assert moments(optimizer) == 4 * 35 == optimizer_state_nbytes("muon", (7, 5))


@pytest.mark.parametrize("dim", [0, 1])
def test_halves_of_a_matrix_are_not_updated_as_the_whole(dim: int):
    begin, grads = weight(8, 6), gradients(8, 6)
    whole, _ = stepped(Muon, begin, grads)
    halves = [
        stepped(Muon, part, list(some))[0]
        for part, *some in zip(begin.chunk(2, dim), *(each.chunk(2, dim) for each in grads), strict=True)
    ]
    assert (torch.cat(halves, dim) - whole).abs().max() > 0.1 * LR


@pytest.mark.parametrize("shape", [(12,), (2, 3, 4, 5)], ids=str)
def test_parameters_that_are_no_matrix_are_refused(shape: tuple[int, ...]):
    with pytest.raises(
        PlanError, match=r"Muon got a parameter of shape .*; needed are whole matrices(?s:.*)optimizer\.name"
    ):
        Muon(groups([torch.nn.Parameter(weight(*shape))]))
