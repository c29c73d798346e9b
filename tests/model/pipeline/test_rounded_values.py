"""A forward on one device whose stages see other values: forwarded ones, views, and their gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.pipeline.rounded_values import RoundedValues, Rounding

Tensors = dict[int, torch.Tensor]
LOST = {stage: torch.full((3, 2), 0.3 * stage, dtype=torch.float64) for stage in (1, 2)}
RETURNED = {stage: torch.full((3, 2), 0.7 * stage, dtype=torch.float64) for stage in (1, 2)}


class Skip(nn.Module):
    """Three blocks; what the first returns is used by the glue behind each other one, once as a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False, dtype=torch.float64) for _ in range(3))
        self.x = torch.randn(3, 2, dtype=torch.float64)

    def forward(self) -> torch.Tensor:
        x = self.a(self.x)
        y = self.b(x)
        flat = x.view(-1)
        return self.c(y * 2 + x) + flat.view(3, 2)


def outcome(module: Skip, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """The output of `run()` and the gradients."""
    output = run()
    output.square().sum().backward()
    return [output.detach(), *(p.grad for p in module.parameters())]


def rounded(lost: Tensors, returned: Tensors) -> list[torch.Tensor]:
    """What one device computes whose stages 1 and 2 get the first block's output less `lost`."""
    module = Skip()
    roundings = {("a", stage): Rounding(lost.get(stage), returned.get(stage)) for stage in {*lost, *returned}}
    values = RoundedValues(roundings, {"a": 0, "b": 1, "c": 2}, num_samples=3)
    return outcome(module, lambda: values.run(module, dict(module.named_children()), module))


@pytest.mark.parametrize(("lost", "returned"), [({}, {}), (LOST, {}), ({}, RETURNED), (LOST, RETURNED)])
def test_each_stage_sees_its_own_value_and_its_gradient_loses_what_came_back(
    lost: Tensors, returned: Tensors
):
    module = Skip()

    def by_hand() -> torch.Tensor:
        x = module.a(module.x)
        first, second = (x - lost[stage] if lost else x * 1 for stage in (1, 2))
        for stage, each in ((1, first), (2, second)) if returned else ():
            each.register_hook(lambda grad, stage=stage: grad - returned[stage])
        return module.c(module.b(first) * 2 + first) + second  # a view is made by each stage

    for found, wanted in zip(rounded(lost, returned), outcome(module, by_hand), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12)


def test_a_part_of_the_samples_takes_its_part_of_what_was_lost():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    lost, x = torch.arange(8.0).view(4, 2), torch.ones(2, 2)
    values = RoundedValues({("0", 1): Rounding(lost)}, {"0": 0, "1": 1}, num_samples=4)
    output = values.run(module, dict(module.named_children()), lambda: module(x), [1, 2])
    assert torch.allclose(output, module[1](module[0](x) - lost[1:3]))
