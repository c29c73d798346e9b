"""The user's model while others hold its values."""

import pytest
import torch
from torch import nn

from meshwright.integrations.released_parameters import ReleasedParameters
from meshwright.plan.job.errors import PlanError


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 5, bias=False))
    made[2].weight = made[0].weight
    return made


def test_a_released_model_has_no_memory_and_refuses_to_be_read():
    module = model()
    released = ReleasedParameters(module)
    assert all(parameter.untyped_storage().nbytes() == 4 for parameter in module.parameters())
    assert all(parameter.isnan().all() for parameter in module.parameters())
    assert [tuple(parameter.shape) for parameter in module.parameters()] == [(5, 3), (3,), (3,)]
    with pytest.raises(PlanError, match="the model is called while MeshwrightTrainer trains it") as error:
        module(torch.zeros(2, dtype=torch.long))
    assert "with trainer.full_params() as model" in str(error.value)
    with pytest.raises(PlanError, match="is asked for its state_dict while MeshwrightTrainer trains it"):
        module.state_dict()
    released.restore({name: torch.ones(p.shape) for name, p in module.named_parameters()}, {})


def test_restored_parameters_are_the_same_objects_with_new_values_and_ties():
    module = model()
    before = dict(module.named_parameters())
    wanted = {name: torch.randn(parameter.shape) for name, parameter in before.items()}
    released = ReleasedParameters(module)
    released.restore(wanted, {"1.running_mean": torch.full((3,), 2.0)})
    assert dict(module.named_parameters()) == before
    assert module[2].weight is module[0].weight
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in module.named_parameters())
    assert module.state_dict()["1.running_mean"].tolist() == [2.0, 2.0, 2.0]
    module(torch.zeros(2, dtype=torch.long))
    assert all(parameter.requires_grad for parameter in module.parameters())
