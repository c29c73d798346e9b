"""Optimizer states by parameter name: what is saved comes back bit by bit, and nothing else is taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import (
    OptimizerParamGroups,
    make_param_groups,
    param_group_numbers,
)
from meshwright.engine.optim.sharded_state_dict import load_local_optimizer_state, local_optimizer_state
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig
from tests.engine.optim.test_make_optimizers import named, with_gradients


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
