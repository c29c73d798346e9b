"""An optimizer over a module, made again over other tensors: the same class, groups and options."""

import pytest
import torch
from torch import nn

from meshwright.engine.optim.optimizer_template import optimizer_template
from meshwright.plan.job.errors import PlanError


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def grouped(model: nn.Module, kind: type = torch.optim.AdamW, **options: object) -> torch.optim.Optimizer:
    first, second = model[0], model[1]  # type: ignore[index]
    return kind([{"params": first.parameters(), "weight_decay": 0.5}, {"params": [second.weight]}], **options)


def test_groups_options_and_class_are_those_of_the_optimizer():
    model = module()
    optimizer = grouped(model, lr=0.25, betas=(0.5, 0.75))
    mine = {name: nn.Parameter(torch.zeros(4)) for name, _ in model.named_parameters()}
    made = optimizer_template(optimizer, model).make(mine)
    assert type(made) is torch.optim.AdamW
    assert [[id(p) for p in group["params"]] for group in made.param_groups] == [
        [id(mine["0.weight"]), id(mine["0.bias"])],
        [id(mine["1.weight"])],
    ]
    for group, wanted in zip(made.param_groups, optimizer.param_groups, strict=True):
        assert {key: value for key, value in group.items() if key != "params"} == {
            key: value for key, value in wanted.items() if key != "params"
        }


def test_parameters_of_other_ranks_leave_their_group_empty():
    model = module()
    mine = {"1.weight": nn.Parameter(torch.zeros(4))}
    made = optimizer_template(grouped(model, lr=0.1), model).make(mine)
    assert [len(group["params"]) for group in made.param_groups] == [0, 1]


def test_an_optimizer_that_has_stepped_is_refused():
    model = module()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(PlanError, match="the AdamW has taken steps already, and their state would get lost"):
        optimizer_template(optimizer, model)


def test_adagrad_has_state_before_its_first_step_and_is_taken():
    model = module()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    assert optimizer.state
    made = optimizer_template(optimizer, model).make(dict(model.named_parameters()))
    assert made.param_groups[0]["lr"] == 0.5


def test_an_optimizer_over_another_module_is_refused():
    with pytest.raises(PlanError, match="the SGD holds 4 parameters that are not of the model passed"):
        optimizer_template(torch.optim.SGD(module().parameters()), module())


class Scaled(torch.optim.SGD):
    """Keeps an option where no copy gets it."""

    def __init__(self, params: object, lr: float = 0.1, *, scale: float = 1.0) -> None:
        super().__init__(params, lr)  # type: ignore[arg-type]
        self.scale = scale


def test_an_option_outside_of_the_groups_that_a_copy_would_lose_is_refused():
    model = module()
    template = optimizer_template(Scaled(model.parameters(), scale=2.0), model)
    with pytest.raises(PlanError, match="Scaled keeps scale where a copy of it does not get them") as error:
        template.make(dict(model.named_parameters()))
    assert "repair: pass what makes it: optimizer=lambda groups: Scaled(groups, ...)" in str(error.value)
    usual = optimizer_template(Scaled(model.parameters()), model).make(dict(model.named_parameters()))
    assert isinstance(usual, Scaled)
