"""Gist's encodings return every bit, of odd sizes, other layouts, negative zeros and NaN; and take the bytes
that the count of zeros says.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the field's name
from torch import nn

from meshwright.parallel.memory import gist_encodings
from meshwright.parallel.memory.gist_encodings import (
    GistEncoder,
    PoolWindow,
    ReluResult,
    pack_bits,
    unpack_bits,
)


class Net(nn.Module):
    """ReLU in place and not, squared ReLU in three forms, and pooling with padding, dilation and indices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 7, 3), nn.Conv2d(7, 3, 3)
        self.last = nn.Linear(27, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.first(x), inplace=True), 3, 2, 1, ceil_mode=True)
        x = torch.relu(self.second(x))
        x = F.relu(self.third(x * x) + self.third(x.square()) + self.third(x**2))
        x, _ = F.max_pool2d(x, (2, 2), dilation=(1, 2), return_indices=True)
        return self.last(F.adaptive_avg_pool2d(x, 3).flatten(1))


def gradients(module: nn.Module, x: torch.Tensor, encoder: GistEncoder | None) -> list[torch.Tensor]:
    module.zero_grad()
    given = x.detach().requires_grad_()
    if encoder is None:
        out = module(given)
    else:
        with encoder.encoding():
            out = module(given)
    out.square().sum().backward()
    return [out, given.grad, *(parameter.grad.clone() for parameter in module.parameters())]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    as_bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return torch.equal(one.view(as_bits), other.view(as_bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_are_the_same_bits(dtype: torch.dtype, memory_format: torch.memory_format):
    torch.manual_seed(0)
    module = Net().to(dtype).to(memory_format=memory_format)
    x = torch.randn(2, 3, 21, 23).to(dtype).to(memory_format=memory_format)
    kept: list[int] = []
    plain = gradients(module, x, None)
    encoded = gradients(module, x, GistEncoder(kept.append))
    assert all(map(same_bits, plain, encoded))
    assert len(kept) == 6  # two results of ReLU that are pooled, one that is squared, and three squares
    assert all(kept)


def test_views_of_a_result_are_encoded_with_it():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Flatten(0))
    kept: list[int] = []
    x = torch.randn(2, 3, 6)  # a linear layer without a bias saves a view [6, 8]
    plain, encoded = gradients(module, x, None), gradients(module, x, GistEncoder(kept.append))
    assert all(map(same_bits, plain, encoded))
    assert len(kept) == 1


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 8)], ids=str)
def test_every_bit_of_a_result_comes_back(
    shape: tuple[int, ...], in_c: bool, monkeypatch: pytest.MonkeyPatch
):
    if not in_c:
        monkeypatch.setattr(gist_encodings.marked_elements, "can_mark", lambda tensor: False)
    result = torch.randn(shape).relu()
    result.view(-1)[:4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    encoded = ReluResult(result.shape, result.stride(), result.dtype)
    encoded.keep_sign(result)
    signs = encoded.signs()
    assert torch.equal(~(signs <= 0), ~(result <= 0))
    encoded.keep_values(result)
    assert same_bits(encoded.decoded(), result)
    assert torch.equal(encoded.signs(), signs)


def test_bytes_are_a_bit_per_element_and_the_values_that_are_not_zero():
    result = torch.randn(11, 13).relu()
    encoded = ReluResult(result.shape, result.stride(), result.dtype)
    encoded.keep_sign(result)
    assert encoded.nbytes == -(-143 // 8)
    encoded.keep_values(result)
    assert encoded.nbytes == -(-143 // 8) + 4 * int((result != 0).sum())
    result[0, 0] = -0.0  # passes no gradient, and has a bit: so the two masks differ
    other = ReluResult(result.shape, result.stride(), result.dtype)
    other.keep_sign(result)
    other.keep_values(result)
    assert other.nbytes == 2 * -(-143 // 8) + 4 * (int((result != 0).sum()) + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_c_and_torch_keep_the_same_bytes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    result = torch.randn(37).relu().to(dtype)
    result[:6] = torch.tensor([-0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-7]).to(
        dtype
    )
    kept = []
    for in_c in (True, False):
        if not in_c:
            monkeypatch.setattr(gist_encodings.marked_elements, "can_mark", lambda tensor: False)
        encoded = ReluResult(result.shape, result.stride(), result.dtype)
        encoded.keep_sign(result)
        encoded.keep_values(result)
        kept.append((encoded.passes, encoded.nonzero, encoded.values, encoded.signs(), encoded.decoded()))
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_bits_are_unpacked_as_they_were_packed():
    mask = torch.rand(21) < 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), 21), mask)


@pytest.mark.parametrize("kernel", [(2, 2), (3, 2)])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(2, 0, 1), (1, 1, 1), (3, 1, 2)])
def test_positions_of_maxima_fit_in_a_byte(kernel: tuple[int, int], stride: int, padding: int, dilation: int):
    _, positions = F.max_pool2d(
        torch.randn(2, 3, 11, 9), kernel, stride, padding, dilation, return_indices=True
    )
    window = PoolWindow(9, kernel, (stride, stride), (padding, padding), (dilation, dilation))
    places = window.encode(positions)
    assert places.dtype == torch.uint8
    assert torch.equal(window.decode(places), positions)


def test_windows_wider_than_planes_or_with_many_places_are_left_alone():
    assert not PoolWindow(40, (17, 16), (1, 1), (0, 0), (1, 1)).is_narrow
    assert not PoolWindow(4, (2, 2), (1, 1), (1, 1), (1, 5)).is_narrow


def test_what_else_is_saved_can_be_rounded_but_not_weights():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
    weights = frozenset(parameter.untyped_storage()._cdata for parameter in module.parameters())
    x = torch.randn(5, 8)
    plain = gradients(module, x, None)
    rounded = gradients(module, x, GistEncoder(lambda number: None, torch.bfloat16, weights))
    assert same_bits(plain[0], rounded[0])
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(plain[1:], rounded[1:], strict=True)]
    assert 0 < max(errors) < 2**-8
    assert errors[1 + 3] == 0  # the gradient of the last bias reads no activation


class Views(nn.Module):
    """Saves three views of one tensor: [2, 3, 4] and its transpose, and [6, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.bmm(x, x.transpose(1, 2)) @ self.last(x)


def test_views_of_one_tensor_are_rounded_each_in_its_shape():
    torch.manual_seed(0)
    module, x = Views(), torch.randn(2, 3, 4)
    plain = gradients(module, x, None)
    rounded = gradients(module, x, GistEncoder(lambda number: None, torch.bfloat16))
    errors = [float((a - b).norm() / a.norm()) for a, b in zip(plain[1:], rounded[1:], strict=True)]
    assert 0 < max(errors) < 2**-6
