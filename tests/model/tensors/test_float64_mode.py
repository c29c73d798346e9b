"""Float64 mode: casts to float32 inside a model or a loss keep float64."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.model.tensors.float64_mode import Float64Mode, in_float64, run_in_float64
from tests.model.block_backward import analyze_model

X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Casting(nn.Module):
    """A linear whose output is cast to float32 on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).float() * torch.ones(4)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.zeros(3, 4) + 0 * x,
        lambda x: torch.zeros(3, 4).index_add_(0, torch.arange(3), x.float()),
        lambda x: torch.full((), 1.5),
        lambda x: torch.full((), torch.finfo(x.dtype).min),
        lambda x: torch.full(size=(2,), fill_value=1.5),
        lambda x: (x > 0).to(torch.float32),
    ],
)
def test_what_would_be_float32_is_float64(cast: object):
    with Float64Mode():
        made = cast(X)
    assert made.dtype == torch.float64


def test_other_dtypes_stay_and_nothing_is_left_behind():
    with Float64Mode():
        assert X.to(torch.bfloat16).dtype == torch.bfloat16
        assert torch.zeros(2, dtype=torch.int64).dtype == torch.int64
        assert torch.arange(3).dtype == torch.full((), 2).dtype == torch.int64
    assert X.float().dtype == torch.float32
    assert torch.zeros(3).dtype == torch.float32


def test_no_digit_is_lost_on_the_way():
    assert torch.equal(in_float64(lambda x: x.float() / 3)(X), X / 3)


def test_a_module_made_in_float64_computes_in_it_and_one_in_float32_as_written():
    analyzed = analyze_model(Casting, {"x": X.float()})
    wide, _, _ = analyzed.make_module("cpu", torch.float64)
    assert wide(X).dtype == torch.float64
    assert torch.equal(wide(X), wide.linear(X))
    assert analyzed.make_module("cpu", torch.float32)[0](X.float()).dtype == torch.float32
    with FakeTensorMode(
        allow_non_fake_inputs=True
    ) as mode:  # as when it is learnt what crosses between parts
        assert analyzed.make_module("cpu", torch.float64, mode)[0](mode.from_tensor(X)).dtype == torch.float64


def test_a_widened_module_takes_what_it_took():
    module = Casting().double()
    run_in_float64(module)
    assert torch.equal(module(x=X), module(X))
