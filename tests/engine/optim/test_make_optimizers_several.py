"""Several optimizers that share the parameters: each is stepped by one, and all of them go on bitwise."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.engine.optim.make_optimizers import OptimizerParamGroups, make_optimizers, param_group_numbers
from meshwright.engine.optim.sharded_state_dict import load_local_optimizer_state, local_optimizer_state
from meshwright.plan.job.errors import PlanError
from meshwright.plan.job.job import OptimizerConfig, ParamGroupConfig
from tests.engine.optim.test_make_optimizers import named, said, with_gradients

SPLIT = OptimizerConfig(
    "adamw",
    lr=0.1,
    weight_decay=0.2,
    groups=(ParamGroupConfig("embed.*", 3.0, name="sgd", momentum=0.9), ParamGroupConfig("*.bias", 0.5)),
)


def test_a_group_may_take_another_optimizer():
    mine = named()
    adamw, sgd = sorted(make_optimizers(SPLIT, mine), key=lambda each: type(each).__name__)
    assert (type(adamw), type(sgd)) == (torch.optim.AdamW, torch.optim.SGD)
    assert said(sgd.param_groups, mine) == [(["embed.weight"], pytest.approx(0.3), 0.2)]
    assert sgd.param_groups[0]["momentum"] == 0.9
    assert said(adamw.param_groups, mine) == [
        (["layer.weight"], 0.1, 0.2),
        (["layer.bias"], 0.05, 0.0),
        (["norm.weight"], 0.1, 0.0),
    ]


def test_several_optimizers_step_as_each_alone_and_go_on_bitwise():
    def run(start: int, stop: int, saved: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> Any:
        parameters = {key: nn.Parameter(value.clone()) for key, value in values.items()}
        optimizers = make_optimizers(SPLIT, parameters)
        initial = param_group_numbers(optimizers)
        load_local_optimizer_state(optimizers, parameters, saved)
        for step in range(start, stop):
            with_gradients(parameters, step)
            for optimizer in optimizers:
                optimizer.step()
        state = {
            key: value.clone()
            for key, value in local_optimizer_state(optimizers, parameters, initial).items()
        }
        return state, {key: parameter.detach() for key, parameter in parameters.items()}

    begin = {key: parameter.detach() for key, parameter in named().items()}
    state, values = run(0, 5, {}, begin)
    again, same = run(3, 5, *run(0, 3, {}, begin))
    assert {key for key in state if "embed" in key} == {"momentum_buffer/embed.weight"}
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)
    assert all(torch.equal(values[key], same[key]) for key in values)
    alone = named()
    sgd = torch.optim.SGD([{"params": [alone["embed.weight"]], "lr": 0.3, "weight_decay": 0.2}], momentum=0.9)
    for step in range(5):
        with_gradients(alone, step)
        sgd.step()
    assert torch.allclose(values["embed.weight"], alone["embed.weight"], rtol=1e-14)


def test_a_list_of_optimizers_must_share_the_parameters():
    def two(groups: OptimizerParamGroups, *, twice: bool = False) -> list[torch.optim.Optimizer]:
        first, *rest = groups
        return [torch.optim.SGD([first]), torch.optim.Adagrad([*rest, dict(first)] if twice else rest)]

    mine = named()
    assert [type(each).__name__ for each in make_optimizers(OptimizerConfig(lr=0.1), mine, two)] == [
        "SGD",
        "Adagrad",
    ]
    with pytest.raises(PlanError, match=r"; 2 are held by two optimizers \(embed\.weight\.\.\.\)"):
        make_optimizers(OptimizerConfig(lr=0.1), mine, lambda groups: two(groups, twice=True))
    with pytest.raises(
        PlanError, match=r"the groups embed\.\* name an optimizer, and one that was passed makes its own"
    ):
        make_optimizers(SPLIT, mine, two)
