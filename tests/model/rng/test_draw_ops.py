"""The operators of stateless draws: the bits of the definition, shapes for fake tensors, one call a mask."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.models.dropout_kernels import OpCounter
from meshwright.model.rng import draw_ops
from meshwright.model.tensors.counter_rng import CHUNK_NUMEL, random_bits, signed64, top53

SAMPLES = torch.tensor([3, 0, 2**62, -5])
KEY = signed64(0xFEDCBA9876543210)


def bits(width: int, first: int = 0) -> torch.Tensor:
    keys = random_bits(KEY, SAMPLES)
    return top53(random_bits(keys[:, None], torch.arange(first, first + width)))


@pytest.mark.parametrize("threshold", [0, 1, round(0.1 * 2**53), 2**52, 2**53 - 1, 2**53])
def test_a_mask_compares_the_upper_bits(threshold: int):
    found = draw_ops.keep_mask(SAMPLES, KEY, 7, 1000, None, threshold)
    assert torch.equal(found, bits(1000, 7) >= threshold)


def test_a_mask_wider_than_a_chunk_is_one_mask():
    found = draw_ops.keep_mask(SAMPLES, KEY, 0, CHUNK_NUMEL + 3, None, 2**52)
    assert torch.equal(found, bits(CHUNK_NUMEL + 3) >= 2**52)


def test_an_index_chooses_the_elements():
    index = torch.tensor([5, 9, 0, 9])
    found = draw_ops.uniform(SAMPLES, KEY, 0, 4, index, torch.float64)
    assert torch.equal(found, bits(10)[:, index].double() * 2.0**-53)


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float64, 53), (torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 8)]
)
def test_numbers_have_the_digits_of_their_dtype(dtype: torch.dtype, digits: int):
    found = draw_ops.uniform(SAMPLES, KEY, 0, 500, None, dtype)
    assert found.dtype == dtype
    assert found.max() < 1
    assert torch.equal(found.double(), (bits(500) >> (53 - digits)).double() * 2.0**-digits)


def test_fake_tensors_of_a_gpu_see_one_operator():
    with FakeTensorMode():
        samples = torch.zeros(8, dtype=torch.int64, device="cuda")
        with OpCounter() as counter:
            mask = draw_ops.keep_mask(samples, KEY, 0, 2**20, None, 2**50)
            numbers = draw_ops.uniform(samples, KEY, 0, 3, None, torch.bfloat16)
    assert (mask.shape, mask.dtype, mask.device.type) == ((8, 2**20), torch.bool, "cuda")
    assert (numbers.shape, numbers.dtype) == ((8, 3), torch.bfloat16)
    assert counter.num_kernels == 2


def test_the_compiler_sees_an_operator_and_no_graph_break():
    def double(samples: torch.Tensor) -> torch.Tensor:
        return draw_ops.keep_mask(samples, KEY, 0, 8, None, 2**52) * 2.0

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert torch.equal(compiled(SAMPLES), double(SAMPLES))
