"""The dtype of the parameters is followed through operations, and ends where a dtype is named."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from meshwright.model.recording.forward_recording import Recording
from meshwright.model.recording.parameter_dtype import tensors_in_parameter_dtype
from meshwright.model.recording.record_forward import ForwardRecorder


class Net(nn.Module):
    """An embedding, and a function of what it returns."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.function = nn.Embedding(5, 4), function

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.function(self.embed(ids))


class CastWeight(nn.Embedding):
    """An embedding whose rows are float32."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.weight.float())


def record(module: nn.Module) -> Recording:
    recorder = ForwardRecorder(module, {}, 2)
    with recorder.recording():
        outputs = module(torch.ones(2, 3, dtype=torch.int64))
    return recorder.finish(outputs)


@pytest.mark.parametrize(
    ("function", "follows"),
    [
        (lambda x: (x * 8.0)[:, -1], True),
        (lambda x: (x + x.relu()).masked_fill(x > 0, 0.0), True),
        (lambda x: x.float() * 2, False),
        (lambda x: x.softmax(-1, dtype=torch.float32), False),
        (lambda x: x.to(x.dtype).relu(), False),
        (lambda x: x + torch.ones(4), False),
        (lambda x: x.relu().type(torch.float32)[0], False),
    ],
)
def test_a_result_has_the_dtype_of_the_parameters_unless_a_dtype_is_named(
    function: Callable[[torch.Tensor], torch.Tensor], follows: bool
):
    recording = record(Net(function))
    result = recording.outputs.id
    assert (result in tensors_in_parameter_dtype(recording, ())) == follows
    assert result not in tensors_in_parameter_dtype(recording, ["embed.weight"])


def test_rows_of_a_cast_weight_do_not_follow():
    recording = record(CastWeight(5, 4))
    assert recording.outputs.id not in tensors_in_parameter_dtype(recording, ())
