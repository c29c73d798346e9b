"""The operations of a recording are the calls of the model's code, with what is not a tensor."""

import torch
from torch import nn

from meshwright.model.recording.model_operations import OperationRecorder, model_operations
from tests.model.recording.recorded_functions import record_function


def test_operations_have_the_parameters_and_constants_that_they_take():
    module = nn.Linear(2, 2)

    def run() -> torch.Tensor:
        return module(torch.ones(1, 2)) * 3

    operations = model_operations(record_function(run, module))
    names = [(each.name, each.params, each.constants) for each in operations]
    assert names[-2:] == [("linear", ("weight", "bias"), ()), ("mul", (), ("3",))]
    assert {each.code.partition(" is ")[2] for each in operations} == {"return module(torch.ones(1, 2)) * 3"}


def test_operations_that_are_noted_alone_are_those_of_a_recording():
    module = nn.Linear(2, 2)

    def run() -> torch.Tensor:
        x = module(torch.ones(3, 2, dtype=torch.float32))
        return torch.cat([x[1:, :2], x[:1]], dim=0).reshape(-1, x.shape[-1]) * module.weight.sum() / 3

    recorder = OperationRecorder(module)
    with recorder:
        run()
    assert recorder.operations == model_operations(record_function(run, module))
    assert not recorder.of_labels


def test_operations_on_labels_alone_are_marked():
    labels, logits = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)
    recorder = OperationRecorder(nn.Linear(2, 2), [labels])
    with recorder:
        shifted = labels[:, 1:].clone()
        _ = logits * labels + shifted.sum()
    names = [each.name for each in recorder.operations]
    marked = [names[number] for number in sorted(recorder.of_labels)]
    assert marked == ["__getitem__", "clone", "sum"]
    assert len(names) == len(marked) + 2
