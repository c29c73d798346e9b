"""Parameter groups by name, torch's fused optimizers, and optimizer states saved by logical name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import (
    OptimizerParamGroups,
    check_optimizers,
    clear_grad_scale,
    clip_in_step,
    load_local_optimizer_state,
    local_optimizer_state,
    make_optimizers,
    make_param_groups,
    param_group_numbers,
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


class Counting(torch.optim.Optimizer):
    """Keeps what optimizers outside of torch keep: Python numbers by parameter, and numbers in its groups."""

    def __init__(self, groups: OptimizerParamGroups, kept: object = None) -> None:
        super().__init__(groups, {"weight_sum": 0.0, "k": 0, "betas": (0.9, 0.99), "kept": False})
        self.extra = kept

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += 0.1 * group["k"] ** 0.5
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", 0)
                state.setdefault("mean", 0.0)
                state["step"] += 1
                state["mean"] = 0.9 * state["mean"] + 0.1 * parameter.grad.mean().item()
                state["odd"] = state["step"] % 2 == 1
                state["none"] = None
                if self.extra is not None:
                    state["extra"] = self.extra
                sign = 1 if state["odd"] else -1
                parameter.add_(
                    parameter.grad,
                    alpha=-group["lr"] * sign / (state["step"] + abs(state["mean"]) + group["weight_sum"]),
                )


FACTORIES: dict[str, Callable[[OptimizerParamGroups], torch.optim.Optimizer]] = {
    "fused adamw": lambda groups: torch.optim.AdamW(groups, fused=True),
    "adam with amsgrad": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
    "asgd": torch.optim.ASGD,
    "python numbers": Counting,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_restored_state_goes_on_bitwise(name: str):
    def run(
        start: int, stop: int, saved: dict[str, torch.Tensor] | None, values: dict[str, torch.Tensor]
    ) -> Any:
        parameters = {key: nn.Parameter(value.clone()) for key, value in values.items()}
        optimizer = FACTORIES[name](make_param_groups(OptimizerConfig(lr=0.01), parameters))
        initial = param_group_numbers([optimizer])
        if saved is not None:
            load_local_optimizer_state([optimizer], parameters, saved)
        for step in range(start, stop):
            with_gradients(parameters, step)
            optimizer.step()
        state = {
            key: value.clone()
            for key, value in local_optimizer_state([optimizer], parameters, initial).items()
        }
        return state, {key: parameter.detach() for key, parameter in parameters.items()}

    begin = {key: parameter.detach() for key, parameter in named(torch.float32).items()}
    state, values = run(0, 5, None, begin)
    halfway = run(0, 3, None, begin)
    again, same = run(3, 5, *halfway)
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) and state[key].dtype == again[key].dtype for key in state)
    assert all(torch.equal(values[key], same[key]) for key in values)


def test_python_numbers_come_back_as_what_they_were():
    parameters = named()
    optimizer = Counting(make_param_groups(OptimizerConfig(), parameters))
    initial = param_group_numbers([optimizer])
    with_gradients(parameters, 0)
    optimizer.step()
    saved = local_optimizer_state([optimizer], parameters, initial)
    assert sorted(saved)[:4] == [
        "group.0:float/weight_sum",
        "group.0:int/k",
        "group.1:float/weight_sum",
        "group.1:int/k",
    ]
    assert {key for key in saved if key.endswith("/layer.bias")} == {
        f"{key}/layer.bias" for key in ("step:int", "mean:float", "odd:bool")
    }
    fresh = Counting(make_param_groups(OptimizerConfig(), parameters))
    load_local_optimizer_state([fresh], parameters, saved)
    assert fresh.state[parameters["layer.bias"]] == {
        "step": 1,
        "mean": optimizer.state[parameters["layer.bias"]]["mean"],
        "odd": True,
    }
    assert [type(value) for value in fresh.state[parameters["layer.bias"]].values()] == [int, float, bool]
    assert (fresh.param_groups[1]["k"], fresh.param_groups[1]["weight_sum"]) == (1, 0.1)


def test_restoring_copies_and_replaces():
    parameters = named()
    optimizer = torch.optim.AdamW(parameters.values())
    with_gradients(parameters, 0)
    optimizer.step()
    saved = local_optimizer_state([optimizer], parameters, {})
    other = torch.optim.AdamW(parameters.values())
    load_local_optimizer_state(
        [other], parameters, {key: value for key, value in saved.items() if not key.startswith("group.")}
    )
    optimizer.step()
    assert other.state[parameters["layer.bias"]]["step"].item() == 1
    assert other.state[parameters["layer.bias"]]["exp_avg"] is not saved["exp_avg/layer.bias"]
    load_local_optimizer_state([other], parameters, {})
    assert len(other.state) == 0


def test_state_that_cannot_be_saved_or_belongs_to_others_is_refused():
    parameters = named()
    optimizer = Counting(make_param_groups(OptimizerConfig(), parameters), kept=[torch.zeros(1)])
    with_gradients(parameters, 0)
    optimizer.step()
    with pytest.raises(
        PlanError,
        match=r"keeps a list as 'extra' of embed\.weight; what can be saved are tensors and numbers",
    ):
        local_optimizer_state([optimizer], parameters, {})
    with pytest.raises(PlanError, match=r"holds 'exp_avg' of head\.weight, which is not trained here"):
        load_local_optimizer_state([optimizer], parameters, {"exp_avg/head.weight": torch.zeros(1)})


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
            clip_in_step([optimizers[0]], list(mine.values()), norm, 0.5)
        for optimizer in optimizers:
            optimizer.step()
        clear_grad_scale([optimizers[0]])
    error = max((mine[name] - theirs[name]).abs().max().item() for name in mine)
    assert error < (1e-6 if dtype == torch.float32 else 1e-15)
