"""Layers of one device that take and return rounded values: those that share one, and gradients."""

from functools import partial

import pytest
import torch
from torch import nn

from meshwright.model.blocks.rounded_layers import RoundedLayers, Rounding, UseKey

LOST, RETURNED = torch.full((3, 2), 0.3, dtype=torch.float64), torch.full((3, 2), 0.7, dtype=torch.float64)


class Shared(nn.Module):
    """A block, called twice, in which two layers take one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Module()
        self.block.q, self.block.k = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(2))
        self.block.forward = lambda x: self.block.q(x) * self.block.k(x) + x
        self.x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def forward(self) -> torch.Tensor:
        return self.block(self.block(self.x))


def use(block_call: str, layer: str, side: str = "input", slot: str = "0") -> UseKey:
    return (block_call, f"block.{layer}", side, slot, "1")


def outcome(module: Shared, run) -> list[torch.Tensor]:
    """The output of `run()` and the gradients."""
    output = run()
    output.square().sum().backward()
    return [output.detach(), module.x.grad, *(each.grad for each in module.parameters())]


def rounded(roundings: dict[UseKey, Rounding], *more: UseKey) -> list[torch.Tensor]:
    module = Shared()
    layers = RoundedLayers(roundings, frozenset((*roundings, *more)), num_samples=3)
    found = outcome(module, partial(layers.run, module, {"block": module.block}, module))
    assert "forward" not in vars(module.block.q)  # its own again
    return found


def by_hand(take_k_rounded: bool) -> list[torch.Tensor]:
    """The second call of the block takes and returns rounded values."""
    module = Shared()

    def run() -> torch.Tensor:
        x = module.block(module.x)
        taken = x - LOST
        taken.register_hook(lambda grad: grad - RETURNED)
        return module.block.q(taken) * module.block.k(taken if take_k_rounded else x) + x

    return outcome(module, run)


@pytest.mark.parametrize("both", [True, False])
def test_layers_that_take_one_tensor_share_its_rounding_and_its_gradient_is_rounded_once(*, both: bool):
    first = {use("block#2", "q"): Rounding(LOST, RETURNED)}
    found = rounded(first, *[use("block#2", "k")] * both)
    for mine, wanted in zip(found, by_hand(take_k_rounded=both), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-13)


def test_an_output_is_rounded_and_without_roundings_nothing_changes():
    module = Shared()
    for mine, wanted in zip(rounded({use("block", "q"): Rounding()}), outcome(module, module), strict=True):
        assert torch.equal(mine, wanted)
    other = Shared()
    other.block.q.register_forward_hook(lambda layer, args, output: output - LOST)
    found = rounded(
        {use(name, "q", "output", ""): Rounding(LOST) for name in ("block", "block#2")},
    )
    for mine, wanted in zip(found, outcome(other, other), strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-13)
