"""The operations of a recording are the calls of the model's code, with what is not a tensor."""

import torch
from torch import nn

from meshwright.model.recording.model_operations import model_operations
from tests.model.recording.recorded_functions import record_function


def test_operations_have_the_parameters_and_constants_that_they_take():
    module = nn.Linear(2, 2)

    def run() -> torch.Tensor:
        return module(torch.ones(1, 2)) * 3

    operations = model_operations(record_function(run, module))
    names = [(each.name, each.params, each.constants) for each in operations]
    assert names[-2:] == [("linear", ("weight", "bias"), ()), ("mul", (), ("3",))]
    assert {each.code.partition(" is ")[2] for each in operations} == {"return module(torch.ones(1, 2)) * 3"}
