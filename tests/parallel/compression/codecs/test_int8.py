"""Codes of one byte: their bytes, their error, and the same bits from C and from torch."""

import pytest
import torch

from meshwright.comm.shared_memory import int8_codes
from meshwright.comm.shared_memory.compile_library import has_library
from meshwright.parallel.compression.codecs.block_codes import BlockCodec
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from tests.parallel.compression.coded_plans import ARRANGEMENTS, check_codes, check_plan, decoded, samples


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_have_the_bytes_of_the_essay(rounding: str):
    check_codes(Int8Compression(rounding=rounding), {1: 5, 7: 11, 256: 260, 257: 265})


def test_an_element_loses_at_most_half_a_step():
    for values in samples():
        step = values.abs().max() / 127
        assert ((values - decoded(Int8Compression(), values)).abs() <= step / 2 * (1 + 1e-5)).all()


def test_stochastic_rounding_is_unbiased():
    codec, values = Int8Compression(rounding="stochastic"), torch.linspace(-1, 1, 256)
    mean = sum(decoded(codec, values, key) for key in range(400)) / 400
    assert (mean - values).abs().max() < 4 * (1 / 127) / 2 / 400**0.5 * 1.5


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 70001])
def test_c_and_torch_make_the_same_bits(numel: int):
    codec, values = Int8Compression(), torch.randn(numel) * torch.logspace(-30, 10, numel)
    values[: numel // 3] *= 1e-42 / 1e-10  # scales below the normal numbers
    if numel > 256:
        values[3], values[256] = float("nan"), float("inf")
    assert int8_codes.can_code(values) or not has_library()
    lost, lost_too = values.clone(), values.clone()
    codes, codes_too = (torch.zeros(codec.code_nbytes(numel), dtype=torch.uint8) for _ in range(2))
    codec.encode_in_place(lost, codes, None)
    BlockCodec.encode_in_place(codec, lost_too, codes_too, None)
    assert torch.equal(codes, codes_too)
    assert torch.equal(lost.view(torch.int32)[lost.isfinite()], lost_too.view(torch.int32)[lost.isfinite()])
    for add in (False, True):
        found, wanted = torch.ones(numel), torch.ones(numel)
        codec.decode_into(codes, found, add=add)
        BlockCodec.decode_into(codec, codes, wanted, add=add)
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ranks_compute_what_their_codes_say(arrangement: str):
    check_plan(Int8Compression(), arrangement)


def test_stochastic_codes_without_feedback_are_what_is_defined():
    check_plan(Int8Compression(rounding="stochastic", error_feedback=False), "ddp")
