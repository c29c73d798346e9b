"""Lion against the formulas of the paper, its bytes, and shards of a weight."""

import pytest
import torch

from meshwright.engine.optim.lion import Lion
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

BETAS = (0.9, 0.99)


def plain(begin: torch.Tensor, grads: list[torch.Tensor], kept: torch.dtype) -> torch.Tensor:
    x, m = begin.clone(), torch.zeros_like(begin)
    for g in grads:
        direction = (BETAS[0] * m + (1 - BETAS[0]) * g).sign()
        x = x - LR * (direction + DECAY * x)
        m = (BETAS[1] * m + (1 - BETAS[1]) * g).to(kept).to(x.dtype)
    return x


@pytest.mark.parametrize("kept", [torch.float64, torch.bfloat16])
def test_it_is_the_papers_rule(kept: torch.dtype):
    begin, grads = weight(7, 5), gradients(7, 5)
    mine, _ = stepped(lambda groups: Lion(groups, betas=BETAS, state_dtype=kept), begin, grads)
    assert (mine - plain(begin, grads, kept)).abs().max() < 1e-15


def test_every_element_moves_by_the_learning_rate():
    begin, grads = torch.zeros(4, 3, dtype=torch.float64), gradients(4, 3, steps=1)
    mine, _ = stepped(Lion, begin, grads)
    assert set((mine / LR).round(decimals=12).abs().flatten().tolist()) == {0.0, 1.0}, (
        "0 where the gradient is"
    )


@pytest.mark.parametrize(("kept", "rule", "width"), [(None, "lion", 4), (torch.bfloat16, "lion_bf16", 2)])
def test_it_keeps_four_or_two_bytes_per_parameter(kept: torch.dtype | None, rule: str, width: int):
    dtype = torch.float32
    _, optimizer = stepped(
        lambda groups: Lion(groups, state_dtype=kept), weight(7, 5, dtype=dtype), gradients(7, 5, dtype=dtype)
    )
    assert moments(optimizer) == width * 35 == optimizer_state_nbytes(rule, (7, 5))


def test_shards_are_updated_as_the_whole():
    begin, grads = weight(7, 5), gradients(7, 5)
    assert torch.equal(stepped_in_shards(Lion, begin, grads, [3, 4, 17]), stepped(Lion, begin, grads)[0])
