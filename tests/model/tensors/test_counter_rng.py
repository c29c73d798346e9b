"""Counter-based random numbers: reference outputs, distributions, and slices equal to slices of the whole."""

import math

import pytest
import torch
from scipy import stats

from meshwright.model.tensors.counter_rng import (
    CHUNK_NUMEL,
    derive_key,
    fill_normal_,
    fill_truncated_normal_,
    fill_uniform_,
    normal,
    random_bits,
    uniform,
)

F64 = torch.float64
NUM = 100_000


def splitmix64(seed: int, count: int) -> list[int]:
    """The published generator, with a state, in Python integers."""
    mask, state, out = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def unsigned(tensor: torch.Tensor) -> list[int]:
    return [word % (1 << 64) for word in tensor.tolist()]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def test_the_first_output_of_seed_0_is_that_of_the_reference():
    assert unsigned(random_bits(0, torch.arange(1))) == [0xE220A8397B1DCDAF]


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B97F4A7C15, (1 << 64) - 1])
def test_bits_are_those_of_splitmix64(seed: int):
    assert unsigned(random_bits(seed, torch.arange(1000))) == splitmix64(seed, 1000)


def test_a_tensor_of_keys_broadcasts():
    keys = random_bits(5, torch.arange(3))
    table = random_bits(keys[:, None], torch.arange(4))
    assert all(
        torch.equal(table[i], random_bits(word % (1 << 64), torch.arange(4)))
        for i, word in enumerate(keys.tolist())
    )


def test_keys_differ_when_labels_are_divided_differently():
    keys = [
        derive_key(0, "ab", "c"),
        derive_key(0, "a", "bc"),
        derive_key(0, "abc"),
        derive_key(1, "abc"),
        derive_key(0, "1"),
        derive_key(0, 1),
        derive_key(0),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= word < 1 << 64 for word in keys)


def test_a_key_is_the_same_in_every_process():
    assert derive_key(0, "weight", 3) == 0x63B0CBF99E94EFD2


def test_uniform_numbers_are_uniform():
    assert stats.kstest(uniform(derive_key(0, "a"), 0, NUM, F64).numpy(), "uniform").pvalue > 1e-3


def test_normal_numbers_are_normal():
    assert stats.kstest(normal(derive_key(0, "a"), 0, NUM, F64).numpy(), "norm").pvalue > 1e-3


def test_truncated_numbers_have_the_truncated_distribution():
    x = torch.empty(NUM, dtype=F64)
    fill_truncated_normal_(x, derive_key(0, "a"), mean=0.5, std=2.0, low=-1.0, high=3.0)
    assert stats.kstest(x.numpy(), stats.truncnorm(-0.75, 1.25, loc=0.5, scale=2.0).cdf).pvalue > 1e-3


def test_bounds_far_from_the_mean_do_not_cut():
    x = torch.empty(NUM)
    fill_truncated_normal_(x, derive_key(0, "a"), std=0.02, low=-2.0, high=2.0)
    assert x.abs().max() < 0.02 * 6
    assert x.std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(
    "other",
    [
        derive_key(0, "a", 1),
        derive_key(1, "a"),
        derive_key(0, "b"),
        derive_key(0, "a") + 1,
        derive_key(0, "a") ^ (1 << 63),
    ],
)
def test_neighbouring_keys_are_uncorrelated(other: int):
    assert abs(
        correlation(normal(derive_key(0, "a"), 0, NUM, F64), normal(other, 0, NUM, F64))
    ) < 4 / math.sqrt(NUM)


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1024])
def test_neighbouring_indices_are_uncorrelated(lag: int):
    x = normal(derive_key(0, "a"), 0, NUM, F64)
    assert abs(correlation(x[lag:], x[:-lag])) < 4 / math.sqrt(NUM)


def test_the_extreme_bits_give_finite_normal_numbers(monkeypatch: pytest.MonkeyPatch):
    extremes = torch.tensor([0, -1, 1, 1 << 62, -(1 << 63), (1 << 63) - 1])
    monkeypatch.setattr("meshwright.model.tensors.counter_rng.random_bits", lambda key, index: extremes)
    x = normal(0, 0, 6, F64)
    assert x.isfinite().all()
    assert x.abs().max() < 8.3
    assert x[0] == -x[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_the_upper_bound_in_every_dtype(dtype: torch.dtype):
    x = torch.empty(NUM, dtype=dtype)
    fill_uniform_(x, derive_key(0, "a"), -0.5, 1.0)
    assert x.max() < 1.0
    assert x.min() >= -0.5


@pytest.mark.parametrize("fill", [fill_uniform_, fill_normal_, fill_truncated_normal_])
def test_rows_made_alone_equal_the_rows_of_the_whole(fill):
    whole = torch.empty(3 * CHUNK_NUMEL // 1000 + 7, 1003)
    fill(whole, derive_key(0, "w"))
    for first, last in ((0, 1), (5, 9), (100, len(whole))):
        part = torch.empty(last - first, 1003)
        fill(part, derive_key(0, "w"), start=first * 1003)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("shape", [(30, 7), (600, 900)])
def test_a_strided_tensor_is_filled_in_the_order_of_its_shape(shape: tuple[int, int]):
    plain, strided = torch.empty(shape), torch.empty(shape[1], shape[0]).t()
    fill_normal_(plain, derive_key(0, "w"))
    fill_normal_(strided, derive_key(0, "w"))
    assert torch.equal(plain, strided)


def test_a_narrower_dtype_holds_the_same_numbers_rounded():
    wide, narrow = normal(3, 0, 1000, F64), normal(3, 0, 1000, torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), narrow)
