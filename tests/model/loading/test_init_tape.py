"""Slices of an initial value are created without the whole, and are bitwise equal to slices of it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model.loading.deferred_init import DeferredInit, defer_init
from meshwright.model.tensors.lazy_mapping import (
    LazyTensors,
    Region,
    narrow_to,
    read_region,
    strip_prefix,
    tensor_shape,
)

WORDS, WIDTH = 67, 9


class Table(nn.Module):
    """A table filled by `fill`."""

    def __init__(self, fill: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, WIDTH))
        with torch.no_grad():
            fill(self.weight)


def padded(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, 0.5, 0.02)
    weight[40].zero_()


def scaled(weight: torch.Tensor) -> None:
    nn.init.uniform_(weight)
    weight.mul_(0.3).add_(1.0).clamp_(max=1.2)


ALONE = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "truncated": nn.init.trunc_normal_,
    "constant": nn.init.ones_,
    "padded": padded,
    "scaled": scaled,
    "in two parts": lambda weight: (nn.init.normal_(weight[:30]), nn.init.uniform_(weight[30:])),
}
TOGETHER = {
    "orthogonal": nn.init.orthogonal_,
    "columns": lambda weight: (nn.init.normal_(weight), weight[:, 2].zero_()),
    "looks at itself": lambda weight: (
        nn.init.normal_(weight),
        weight.div_(weight.norm(dim=1, keepdim=True)),
    ),
    "copied": lambda weight: weight.copy_(torch.randn(WORDS, WIDTH)),
}


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.untyped_storage().nbytes() // out.itemsize)
        return out


def print_of(fill: Callable[[torch.Tensor], object]) -> DeferredInit:
    return defer_init(lambda: Table(fill), seed=3)


@pytest.mark.parametrize("fill", ALONE.values(), ids=ALONE)
def test_rows_are_created_without_the_whole(fill: Callable[[torch.Tensor], object]):
    made = print_of(fill)
    whole = made.initial_value("weight")
    for rows in (range(22), range(22, 45), range(45, WORDS)):
        with Largest() as largest:
            some = made.initial_value("weight", rows=rows)
        assert torch.equal(some, whole[rows.start : rows.stop])
        assert largest.numel <= len(rows) * WIDTH


@pytest.mark.parametrize("fill", TOGETHER.values(), ids=TOGETHER)
def test_initializers_that_need_the_whole_are_sliced_afterwards(fill: Callable[[torch.Tensor], object]):
    made = print_of(fill)
    whole = made.initial_value("weight")
    some = made.initial_value("weight", rows=range(22, 45))
    assert torch.equal(some, whole[22:45])
    assert some.untyped_storage().nbytes() == some.nbytes, "the whole is not kept"


def test_a_parameter_that_comes_with_its_values_is_read_by_rows():
    given = nn.Embedding(WORDS, WIDTH)
    made = defer_init(lambda: nn.Sequential(given), seed=0)
    assert torch.equal(
        made.initial_value("0.weight", rows=range(10, 20)), made.initial_value("0.weight")[10:20]
    )


def test_rows_and_shapes_are_asked_for_without_the_rest():
    asked: list[object] = []

    def some(name: str, region: Region = ()) -> torch.Tensor:
        asked.append((name, *region))
        return narrow_to(torch.arange(12.0).view(6, 2), region)

    tensors = strip_prefix("model/", LazyTensors(["model/w"], some, some, lambda name: (6, 2)))
    assert torch.equal(read_region(tensors, "w", (range(2, 4),)), torch.tensor([[4.0, 5.0], [6.0, 7.0]]))
    assert tensor_shape(tensors, "w") == (6, 2)
    assert asked == [("model/w", range(2, 4))]
    assert read_region({"w": torch.ones(3)}, "w", (range(1),)).shape == (1,)
