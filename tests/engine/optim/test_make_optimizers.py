"""Parameter groups by name, torch's fused optimizers, and optimizer states saved by logical name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import (
    OptimizerParamGroups,
    check_optimizers,
    make_optimizer,
    make_optimizers,
    make_param_groups,
)
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig

SHAPES = {"embed.weight": (5, 3), "layer.weight": (4, 3), "layer.bias": (4,), "norm.weight": (3,)}


def named(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    """Parameters of `SHAPES`, filled with steps."""
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {
        name: nn.Parameter(torch.linspace(-1, 1, sizes[name], dtype=dtype).view(SHAPES[name]))
        for name in SHAPES
    }


def with_gradients(parameters: dict[str, nn.Parameter], step: int) -> dict[str, nn.Parameter]:
    for parameter in parameters.values():
        parameter.grad = (
            torch.linspace(-1, 2, parameter.numel(), dtype=parameter.dtype)
            .view(parameter.shape)
            .mul(step + 1)
            .sin()
        )
    return parameters


def said(
    groups: OptimizerParamGroups, parameters: dict[str, nn.Parameter]
) -> list[tuple[list[str], float, float]]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"]) for group in groups]


def test_norms_and_biases_take_no_decay_by_default():
    parameters = named()
    assert said(make_param_groups(OptimizerConfig(lr=0.5, weight_decay=0.1), parameters), parameters) == [
        (["embed.weight", "layer.weight"], 0.5, 0.1),
        (["layer.bias", "norm.weight"], 0.5, 0.0),
    ]


def test_the_first_pattern_that_matches_decides():
    rules = (
        ParamGroupConfig("layer.bias", 0.5),
        ParamGroupConfig("layer.*", 2.0, 0.3),
        ParamGroupConfig("embed.*", weight_decay=0.0),
    )
    parameters = named()
    assert said(
        make_param_groups(OptimizerConfig(lr=1.0, weight_decay=0.1, groups=rules), parameters), parameters
    ) == [
        (["embed.weight", "norm.weight"], 1.0, 0.0),
        (["layer.weight"], 2.0, 0.3),
        (["layer.bias"], 0.5, 0.0),
    ]


def test_patterns_that_decide_nothing_are_refused():
    rules = (ParamGroupConfig("*.weight"), ParamGroupConfig("head.*"), ParamGroupConfig("embed.weight"))
    with pytest.raises(PlanError) as caught:
        make_param_groups(OptimizerConfig(groups=rules), named())
    assert str(caught.value) == (
        "optimizer.groups: the patterns embed.weight, head.* match no trainable parameter (or an "
        "earlier pattern takes all of"
        " theirs)\n  repair: write patterns such as '*.weight'; a name here is 'embed.weight'"
    )


PLAIN: dict[str, tuple[OptimizerConfig, Callable[[OptimizerParamGroups], torch.optim.Optimizer]]] = {
    "sgd": (
        OptimizerConfig("sgd", lr=0.1, weight_decay=0.2),
        lambda groups: torch.optim.SGD(groups, lr=9.0, foreach=False, fused=False),
    ),
    "sgd with momentum": (
        OptimizerConfig("sgd", lr=0.1, weight_decay=0.2, momentum=0.9),
        lambda groups: torch.optim.SGD(groups, lr=9.0, momentum=0.9, foreach=False, fused=False),
    ),
    "adamw": (
        OptimizerConfig("adamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6),
        lambda groups: torch.optim.AdamW(
            groups, lr=9.0, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False
        ),
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_fused_optimizers_compute_what_plain_ones_do(name: str):
    spec, plain = PLAIN[name]
    mine, theirs = named(), named()
    (fused,), reference = make_optimizers(spec, mine), plain(make_param_groups(spec, theirs))
    assert all(group["fused"] for group in fused.param_groups)
    for step in range(4):
        with_gradients(mine, step)
        with_gradients(theirs, step)
        fused.step()
        reference.step()
    assert max((mine[key] - theirs[key]).abs().max().item() for key in mine) < 1e-14


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_move_on_a_cpu(name: str, dtype: torch.dtype):
    wide = torch.nn.Parameter(torch.linspace(1, 2, 1003))
    half = torch.nn.Parameter(wide.detach().to(dtype))
    for param in (wide, half):
        param.grad = torch.linspace(-1, 2, 1003).to(param.dtype)
        make_optimizer(name, 0.0, OptimizerConfig(name, lr=0.5), [{"params": [param]}]).step()
    torch.testing.assert_close(half.float(), wide, rtol=0.02, atol=0.02)


def test_an_optimizer_over_other_parameters_is_refused():
    parameters, others = named(), named()
    check_optimizers([torch.optim.SGD(parameters.values())], parameters)
    with pytest.raises(
        PlanError,
        match=r"misses 4 of the 4 parameters that are trained \(embed.weight\.\.\.\), and holds 4 others",
    ):
        check_optimizers([torch.optim.SGD(others.values())], parameters)
    with pytest.raises(
        PlanError,
        match=r"misses 1 of the 4 .*\(norm.weight\.\.\.\), and holds 0 others(?s:.*)from the groups",
    ):
        check_optimizers([torch.optim.SGD(list(parameters.values())[:-1])], parameters)
