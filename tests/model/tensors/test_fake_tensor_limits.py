"""The device of a fake tensor is known without asking through modes."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.tensors.fake_tensor_limits import asks_for_device


class Asked(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.answers: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.answers.append(asks_for_device(func, args))
        return args[0].device if self.answers[-1] else func(*args, **(kwargs or {}))


def test_a_question_for_the_device_is_told_from_an_operation():
    with FakeTensorMode() as fakes:
        tensor = torch.ones(2)
    asked = Asked()
    with fakes, asked:
        assert torch.ops.prim.device.default(tensor) == torch.device("cpu")
        tensor + 1
    assert asked.answers == [True, False]
