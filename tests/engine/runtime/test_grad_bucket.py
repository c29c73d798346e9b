"""Gradients as one contiguous buffer."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.engine.runtime.grad_bucket import GradBucket

SHAPES = {"matrix": (2, 3), "scalar": (), "vector": (4,)}


def parameters(**gradients: float) -> dict[str, nn.Parameter]:
    """Parameters of `SHAPES`; those that are named have a gradient of that value."""
    held = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    for name, value in gradients.items():
        held[name].grad = torch.full(SHAPES[name], value)
    return held


def test_packing_copies_gradients_in_order_and_makes_each_a_view():
    held = parameters(matrix=1.0, scalar=2.0, vector=3.0)
    bucket = GradBucket(held, torch.float32)
    bucket.pack(SHAPES)
    assert bucket.buffer.tolist() == [1.0] * 6 + [2.0] + [3.0] * 4
    bucket.buffer.mul_(2)
    assert {name: p.grad.unique().tolist() for name, p in held.items()} == {
        "matrix": [2],
        "scalar": [4],
        "vector": [6],
    }
    assert {name: tuple(p.grad.shape) for name, p in held.items()} == SHAPES


def test_gradients_begin_at_multiples_with_zeros_between():
    bucket = GradBucket(parameters(matrix=1.0, scalar=2.0, vector=3.0), torch.float32, align_numel=4)
    bucket.pack(SHAPES)
    assert bucket.buffer.tolist() == [1.0] * 6 + [0.0] * 2 + [2.0] + [0.0] * 3 + [3.0] * 4
    assert bucket.flat_gradients(["scalar", "vector"]).tolist() == [2.0] + [0.0] * 3 + [3.0] * 4


def test_all_gradients_are_copied_by_one_call():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    held = parameters(matrix=1.0, vector=3.0)
    bucket = GradBucket(held, torch.float32)
    with Calls():
        bucket.pack(SHAPES)
    assert names == ["_foreach_zero_.default", "_foreach_copy_.default"]


def test_later_gradients_are_added_in_place():
    held = parameters(matrix=1.0, scalar=1.0, vector=1.0)
    bucket = GradBucket(held, torch.float32)
    bucket.pack(SHAPES)
    sum((parameter * 3).sum() for parameter in held.values()).backward()
    assert bucket.buffer.tolist() == [4.0] * 11
    assert held["matrix"].grad.data_ptr() == bucket.buffer.data_ptr()
    bucket.pack(SHAPES)
    assert bucket.buffer.tolist() == [4.0] * 11


def test_some_gradients_can_be_packed_before_the_rest():
    held = parameters(vector=3.0)
    bucket = GradBucket(held, torch.float32)
    bucket.pack(["vector"])
    held["matrix"].grad, held["scalar"].grad = torch.ones(2, 3), torch.tensor(2.0)
    bucket.pack(["matrix", "scalar"])
    assert bucket.buffer.tolist() == [1.0] * 6 + [2.0] + [3.0] * 4


def test_a_parameter_without_a_gradient_is_packed_as_zeros():
    held = parameters(matrix=1.0)
    bucket = GradBucket(held, torch.float32)
    bucket.buffer.fill_(7)
    bucket.pack(SHAPES)
    assert bucket.buffer.tolist() == [1.0] * 6 + [0.0] * 5
    assert held["scalar"].grad is not None


def test_another_dtype_is_sent_and_unpacked():
    held = parameters(matrix=1 / 3, vector=1.0)
    bucket = GradBucket(held, torch.bfloat16)
    bucket.pack(SHAPES)
    assert held["matrix"].grad.dtype == torch.float32
    assert held["scalar"].grad is None
    bucket.buffer.mul_(2)
    bucket.unpack()
    assert {parameter.grad.dtype for parameter in held.values()} == {torch.float32}
    assert held["matrix"].grad.unique().tolist() == [torch.tensor(1 / 3).bfloat16().mul(2).float().item()]
    assert [held["scalar"].grad.item(), *held["vector"].grad.tolist()] == [0.0] + [2.0] * 4
