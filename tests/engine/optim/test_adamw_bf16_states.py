"""AdamW with bfloat16 states against torch's AdamW whose states are rounded between its steps."""

import pytest
import torch
from torch import nn

from meshwright.engine.optim.adamw_bf16_states import AdamWBF16
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes
from tests.engine.optim.known_gradients import gradients, groups, moments, stepped, stepped_in_shards, weight

KEYS = ("exp_avg", "exp_avg_sq")


def plain(begin: torch.Tensor, grads: list[torch.Tensor], kept: torch.dtype) -> torch.Tensor:
    x = nn.Parameter(begin.clone())
    optimizer = torch.optim.AdamW(groups([x]), betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for g in grads:
        x.grad = g.clone()
        optimizer.step()
        state = optimizer.state[x]
        state |= {key: state[key].to(kept).to(x.dtype) for key in KEYS}
    return x.detach()


@pytest.mark.parametrize("kept", [torch.float64, torch.bfloat16])
def test_it_is_adamw_with_rounded_moments(kept: torch.dtype):
    begin, grads = weight(7, 5), gradients(7, 5)
    mine, _ = stepped(lambda groups: AdamWBF16(groups, state_dtype=kept), begin, grads)
    assert (mine - plain(begin, grads, kept)).abs().max() < 1e-14


def test_rounding_changes_a_step_by_less_than_two_percent():
    begin, grads = weight(40, 30), gradients(40, 30, steps=20)
    exact, rounded = (plain(begin, grads, kept) - begin for kept in (torch.float64, torch.bfloat16))
    assert (exact - rounded).norm() < 0.02 * exact.norm()


def test_the_second_moment_falls_again_at_the_bound_that_the_job_sets_and_not_above():
    for beta, falls in ((1 - 2**-8, True), (0.999, False)):
        grads = [torch.ones(1, dtype=torch.float64), *[torch.zeros(1, dtype=torch.float64)] * 50]
        _, optimizer = stepped(lambda groups, b=beta: AdamWBF16(groups, betas=(0.9, b)), weight(1), grads)
        (state,) = optimizer.state.values()
        assert (state["exp_avg_sq"].item() < 0.9 * (1 - beta)) == falls


def test_it_keeps_four_bytes_per_parameter():
    _, optimizer = stepped(AdamWBF16, weight(7, 5, dtype=torch.float32), gradients(7, 5, dtype=torch.float32))
    assert moments(optimizer) == 4 * 35 == optimizer_state_nbytes("adamw_bf16", (7, 5))


def test_shards_are_updated_as_the_whole():
    begin, grads = weight(7, 5), gradients(7, 5)
    assert torch.equal(
        stepped_in_shards(AdamWBF16, begin, grads, [3, 4, 17]), stepped(AdamWBF16, begin, grads)[0]
    )
