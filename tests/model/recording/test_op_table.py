"""Operations that treat each token by itself are distinguished from others."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name

from meshwright.model.recording.op_table import reads_values, tokenwise_problem
from tests.model.recording.recorded_functions import record_function

STREAM, OTHER = torch.rand(3, 5, 4), torch.rand(3, 5, 4)


def reason_not_tokenwise(func: object, *args: object, **kwargs: object) -> str:
    """Returns what is said of `func`, whose first argument is the stream, and so is `OTHER`."""
    call = next(record_function(lambda: func(*args, **kwargs)).calls())
    operands = [each for each in args if isinstance(each, torch.Tensor)]
    pairs = zip(operands, call.inputs, strict=True)
    carried = [record for tensor, record in pairs if tensor is STREAM or tensor is OTHER]
    name = func.__name__.strip("_")
    return tokenwise_problem(name, call.args, call.kwargs, call.inputs, carried, call.outputs[0])


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (torch.Tensor.__add__, (STREAM, OTHER), {}),
        (torch.mul, (STREAM, torch.rand(4)), {}),
        (torch.mul, (STREAM, torch.rand(3, 1, 4)), {}),
        (torch.Tensor.__rsub__, (STREAM, 1.0), {}),
        (torch.Tensor.pow, (STREAM, 2), {}),
        (torch.Tensor.mean, (STREAM, -1), {"keepdim": True}),
        (torch.Tensor.mean, (STREAM,), {"dim": (2,)}),
        (F.layer_norm, (STREAM, (4,)), {}),
        (F.rms_norm, (STREAM,), {"normalized_shape": (4,)}),
        (F.softmax, (STREAM,), {"dim": -1}),
        (F.dropout, (STREAM, 0.0), {}),
    ],
)
def test_tokenwise_operations_are_known(func: object, args: tuple, kwargs: dict):
    assert reason_not_tokenwise(func, *args, **kwargs) == ""


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "message"),
    [
        (torch.mul, (STREAM, torch.rand(5, 4)), {}, "of a tensor of all tokens"),
        (torch.add, (STREAM, torch.rand(3, 5, 1)), {}, "of a tensor of all tokens"),
        (torch.Tensor.mean, (STREAM,), {}, "takes mean over tokens"),
        (torch.Tensor.mean, (STREAM, 1), {}, "takes mean over tokens"),
        (torch.Tensor.sum, (STREAM, (1, 2)), {}, "takes sum over tokens"),
        (F.layer_norm, (STREAM, (5, 4)), {}, "takes layer_norm over tokens"),
        (torch.transpose, (STREAM, 1, 2), {}, "computes 'transpose' with it"),
        (torch.Tensor.reshape, (STREAM, -1, 4), {}, "computes 'reshape' with it"),
        (torch.Tensor.cumsum, (STREAM, 1), {}, "computes 'cumsum' with it"),
        (torch.Tensor.__matmul__, (STREAM, torch.rand(4, 4)), {}, "computes 'matmul' with it"),
    ],
)
def test_other_operations_are_not_tokenwise(func: object, args: tuple, kwargs: dict, message: str):
    assert message in reason_not_tokenwise(func, *args, **kwargs)


def test_an_operation_that_reads_a_value_is_not_tokenwise():
    assert reads_values("item")
    assert not reads_values("size")
