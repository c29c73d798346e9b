"""Adafactor against the sums of the paper, and against torch's."""

import pytest
import torch

from meshwright.engine.optim.adafactor import Adafactor
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes
from tests.engine.optim.known_gradients import (
    DECAY,
    LR,
    gradients,
    moments,
    stepped,
    stepped_in_shards,
    weight,
)

SHAPES = [(7, 5), (1, 6), (6, 1), (3, 4, 5), (8,), ()]


def plain(begin: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    """Algorithms 4 and 5 with sums over rows and columns, as the paper writes them; matrices are the last two
    dims.
    """
    x, r, c, v = begin.clone(), 0.0, 0.0, 0.0
    for t, g in enumerate(grads, 1):
        beta, squares = 1 - t**-0.8, g * g + 1e-30
        if x.ndim > 1:
            r = beta * r + (1 - beta) * squares.sum(-1, keepdim=True)
            c = beta * c + (1 - beta) * squares.sum(-2, keepdim=True)
            usual = r @ c / r.sum(-2, keepdim=True)
        else:
            v = beta * v + (1 - beta) * squares
            usual = v
        u = g / usual.sqrt()
        u = u / max(1.0, u.square().mean().sqrt().item())
        length = max(1e-3, x.square().mean().sqrt().item()) * LR
        x = x - LR * DECAY * x - length * u
    return x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_papers_algorithm(shape: tuple[int, ...]):
    begin, grads = weight(*shape), gradients(*shape)
    assert (stepped(Adafactor, begin, grads)[0] - plain(begin, grads)).abs().max() < 1e-14


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_it_is_torchs(shape: tuple[int, ...]):
    begin, grads = weight(*shape), gradients(*shape)
    theirs = stepped(
        lambda groups: torch.optim.Adafactor(groups, eps=(1e-30, 1e-3), foreach=False), begin, grads
    )[0]
    assert (stepped(Adafactor, begin, grads)[0] - theirs).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("shape", "elements"), [((7, 5), 12), ((64, 32), 96), ((3, 4, 5), 3 * 9), ((8,), 8), ((), 1)], ids=str
)
def test_it_keeps_rows_and_columns(shape: tuple[int, ...], elements: int):
    _, optimizer = stepped(
        Adafactor, weight(*shape, dtype=torch.float32), gradients(*shape, dtype=torch.float32)
    )
    kept = (
        moments(optimizer)
        if shape
        else sum(v.nbytes for v in optimizer.state_dict()["state"][0].values() if torch.is_tensor(v))
    )
    assert kept == 4 * elements == optimizer_state_nbytes("adafactor", shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_with_a_zero_row_and_column_gives_finite_updates(dtype: torch.dtype):
    begin, grads = weight(6, 4, dtype=dtype), gradients(6, 4, dtype=dtype)
    for gradient in grads:
        gradient[2] = 0
        gradient[:, 1] = 0
    mine, _ = stepped(Adafactor, begin, grads)
    assert torch.isfinite(mine).all()


def test_shards_are_not_updated_as_the_whole():
    begin, grads = weight(7, 5), gradients(7, 5)
    whole, _ = stepped(Adafactor, begin, grads)
    assert (stepped_in_shards(Adafactor, begin, grads, [15]) - whole).abs().max() > 1e-4
