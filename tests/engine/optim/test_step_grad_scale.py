"""Gradients that the optimizer scales while it reads them equal gradients that were scaled before."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import OptimizerParamGroups, make_param_groups
from meshwright.engine.optim.step_grad_scale import clear_grad_scale, clip_in_step
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig
from tests.engine.optim.test_make_optimizers import named, with_gradients
from tests.engine.optim.test_sharded_state_dict import FACTORIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factory", ["fused adamw", "rmsprop", "python numbers"])
def test_gradients_are_scaled_for_one_step(factory: str, dtype: torch.dtype):
    mine, theirs = named(dtype), named(dtype)
    spec = OptimizerConfig("sgd", lr=0.1, weight_decay=0.0)
    optimizers = [FACTORIES[factory](make_param_groups(spec, held)) for held in (mine, theirs)]
    for step in range(3):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        if step != 1:
            torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
            norm = torch.nn.utils.get_total_norm([p.grad for p in mine.values()])
            clip_in_step([optimizers[0]], list(mine.values()), norm, (norm + 1e-6) / 0.5, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        clear_grad_scale([optimizers[0]])
    error = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    assert error < (1e-6 if dtype == torch.float32 else 1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("second", [lambda groups: torch.optim.SGD(groups, fused=True), torch.optim.Adagrad])
def test_several_optimizers_take_the_same_scaled_gradients(
    second: Callable[[OptimizerParamGroups], torch.optim.Optimizer], dtype: torch.dtype
):
    """Both fused: scaled while they read. One that does not know of that: scaled in place, once for both."""
    mine, theirs = named(dtype), named(dtype)

    def both(parameters: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        first, *rest = make_param_groups(
            OptimizerConfig("sgd", lr=0.1, weight_decay=0.0, groups=(ParamGroupConfig("embed.*", 2.0),)),
            parameters,
        )
        return [torch.optim.SGD([first], fused=True), second(rest)]

    optimizers = both(mine), both(theirs)
    with_gradients(mine, 0)
    with_gradients(theirs, 0)
    torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
    norm = torch.nn.utils.get_total_norm([p.grad for p in mine.values()])
    clip_in_step(optimizers[0], list(mine.values()), norm, (norm + 1e-6) / 0.5, 0.5)
    for optimizer in (*optimizers[0], *optimizers[1]):
        optimizer.step()
    error = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    assert error < (1e-6 if dtype == torch.float32 else 1e-15)
