"""The product per group of rows: values and gradients, on kernels, in the loop and on fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.nn.grouped_linear import grouped_linear

GROUPS = {"one is empty": [3, 3, 4, 6], "all in one": [0, 7, 7, 7], "none": [0, 0, 0, 0], "all": [1, 2, 5, 7]}


def operands(dtype: torch.dtype, in_width: int = 8, out_width: int = 16, rows: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (rows, in_width), (4, out_width, in_width)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def grads_of_loop(rows: torch.Tensor, weight: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, ...]:
    """The result for rows of a group, and the gradients of its sum of squares."""
    parts = [
        rows[begin:end] @ weight[i].T for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    result = torch.cat(parts)
    return result, *torch.autograd.grad(result.square().sum(), (rows, weight))


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    [
        (torch.float64, 5, 1e-13),
        (torch.float32, 8, 1e-5),
        (torch.float32, 5, 1e-5),
        (torch.bfloat16, 8, 2e-2),
    ],
)
def test_a_product_per_group_equals_a_loop_over_groups(groups, dtype, width, tolerance):
    ends, (rows, weight) = GROUPS[groups], operands(dtype, width)
    result = grouped_linear(rows, weight, torch.tensor(ends, dtype=torch.int32))
    assert result.shape == (7, 16)
    result = result[: ends[-1]]
    found = result, *torch.autograd.grad(result.square().sum(), (rows, weight))
    expected = grads_of_loop(*(each.detach().double().requires_grad_() for each in (rows, weight)), ends)
    assert found[1][: ends[-1]].isfinite().all()
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        mine, theirs = (each[: ends[-1]] if i == 1 else each for each in (mine, theirs))
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)


class _CountLike(TorchDispatchMode):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.found = numel, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and not func.is_view and result.numel() == self.numel
        self.found += is_new
        return result


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_backward_makes_one_gradient_of_the_size_of_all_matrices(dtype):
    rows, weight = operands(dtype)
    result = grouped_linear(rows, weight, torch.tensor([1, 2, 5, 7], dtype=torch.int32))
    with _CountLike(weight.numel()) as count:
        torch.autograd.grad(result.sum(), (rows, weight))
    assert count.found == 1


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode():
        rows, weight = torch.empty(7, 5, requires_grad=True), torch.empty(4, 3, 5, requires_grad=True)
        result = grouped_linear(rows, weight, torch.zeros(4, dtype=torch.int32))
        result.sum().backward()
        assert result.shape == (7, 3)
        assert weight.grad.shape == weight.shape
        assert rows.grad.shape == rows.shape
