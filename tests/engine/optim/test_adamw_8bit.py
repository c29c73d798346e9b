"""AdamW with 8-bit states against torch's AdamW whose states are quantized by a table between its steps."""

import pytest
import torch
from torch import nn

from meshwright.engine.optim.adamw_8bit import (
    AdamW8bit,
    dequantize_blocks,
    quantization_levels,
    quantize_blocks,
)
from meshwright.plan.optimizer_per_param import optimizer_state_nbytes
from tests.engine.optim.known_gradients import gradients, groups, moments, stepped, stepped_in_shards, weight


def table(signed: bool) -> torch.Tensor:
    """The paper's dynamic tree, written out: in decade d the middles of 2**d equal parts (unsigned: twice as
    many).
    """
    found = [0.0 if signed else 1e-7, 1.0]
    for decade in range(7):
        parts = 2**decade * (1 if signed else 2)
        middles = [0.1 + 0.9 * (part + 0.5) / parts for part in range(parts)]
        found += [middle * 10.0 ** (decade - 6) for middle in middles]
        found += [-middle * 10.0 ** (decade - 6) for middle in middles if signed]
    return torch.tensor(sorted(found), dtype=torch.float64)


def quantized(moment: torch.Tensor, signed: bool) -> torch.Tensor:
    """`moment` with every element replaced by the nearest number of its block of 256."""
    known, flat = table(signed), moment.reshape(-1).clone()
    for begin in range(0, len(flat), 256):
        block = flat[begin : begin + 256]
        scale = block.abs().max().float().double()
        if scale > 0:
            nearest = (block[:, None] / scale - known[None, :]).abs().argmin(dim=1)
            flat[begin : begin + 256] = known[nearest] * scale
    return flat.view(moment.shape)


def plain(begin: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    x = nn.Parameter(begin.clone())
    optimizer = torch.optim.AdamW(groups([x]), betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    for g in grads:
        x.grad = g.clone()
        optimizer.step()
        state = optimizer.state[x]
        state |= {
            "exp_avg": quantized(state["exp_avg"], True),
            "exp_avg_sq": quantized(state["exp_avg_sq"], False),
        }
    return x.detach()


@pytest.mark.parametrize("shape", [(30, 41), (256,), (1,)], ids=str)
def test_it_is_adamw_with_quantised_moments(shape: tuple[int, ...]):
    begin, grads = weight(*shape), gradients(*shape)
    assert (stepped(AdamW8bit, begin, grads)[0] - plain(begin, grads)).abs().max() < 1e-14


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_are_the_papers_tree(signed: bool):
    mine = quantization_levels(signed=signed)
    assert len(mine) == 256
    assert torch.allclose(mine, table(signed), rtol=1e-14, atol=0)
    assert (mine.min() > 0) != signed, "no second moment is rounded to nothing"


def test_large_values_of_a_block_keep_their_digits_and_outliers_affect_only_their_block():
    values = weight(512)
    values[300] = 1e6
    known = quantization_levels(signed=True)
    back = dequantize_blocks(*quantize_blocks(values, known), known)
    large = values[:256].abs() > 0.1 * values[:256].abs().max()
    assert ((back - values)[:256][large].abs() / values[:256][large].abs()).max() < 0.08
    assert back[300] == 1e6
    assert (back[256:] - values[256:])[:40].abs().max() > 0.01, "beside the outlier little is left"
    assert torch.equal(dequantize_blocks(*quantize_blocks(values * 0, known), known), values * 0)


def test_rounding_changes_a_step_by_less_than_a_tenth():
    begin, grads = weight(40, 30), gradients(40, 30, steps=20)
    exact = nn.Parameter(begin.clone())
    optimizer = torch.optim.AdamW(groups([exact]), betas=(0.9, 0.95))
    for g in grads:
        exact.grad = g.clone()
        optimizer.step()
    way = exact.detach() - begin
    assert (stepped(AdamW8bit, begin, grads)[0] - begin - way).norm() < 0.1 * way.norm()


@pytest.mark.parametrize("shape", [(256,), (30, 41), (5,)], ids=str)
def test_it_keeps_two_bytes_and_two_scales_per_block(shape: tuple[int, ...]):
    _, optimizer = stepped(
        AdamW8bit, weight(*shape, dtype=torch.float32), gradients(*shape, dtype=torch.float32)
    )
    numel = torch.Size(shape).numel()
    assert (
        moments(optimizer) == 2 * numel + 8 * -(-numel // 256) == optimizer_state_nbytes("adamw_8bit", shape)
    )


def test_shards_of_whole_blocks_are_updated_as_the_whole_and_others_are_not():
    begin, grads = weight(30, 41), gradients(30, 41)
    whole, _ = stepped(AdamW8bit, begin, grads)
    assert torch.equal(stepped_in_shards(AdamW8bit, begin, grads, [256, 768]), whole)
    assert not torch.equal(stepped_in_shards(AdamW8bit, begin, grads, [300, 768]), whole)
