"""Codes of chunks and blocks: their bytes, and their padding."""

import pytest
import torch

from meshwright.parallel.compression.codecs.block_codes import CHUNK, BlockCodec, in_blocks
from meshwright.parallel.compression.codecs.cast import CastCompression
from meshwright.parallel.compression.codecs.int4 import Int4Compression
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sign import SignCompression
from tests.parallel.compression.coded_plans import decoded


def test_slices_of_many_chunks_have_the_bytes_of_their_chunks():
    codec = Int4Compression()
    numel = 2 * CHUNK + 3
    assert codec.slice_nbytes(numel) == 2 * codec.code_nbytes(CHUNK) + codec.code_nbytes(3)
    values = torch.randn(numel)
    whole = decoded(codec, values, key=0)
    parts = [decoded(codec, each, key=0) for each in values.split(CHUNK)]
    assert torch.equal(whole, torch.cat(parts))


def test_blocks_are_padded_with_zeros():
    assert in_blocks(torch.ones(5), 4).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    "codec", [Int8Compression(), Int4Compression(), CastCompression(dtype="float8"), SignCompression()]
)
def test_a_rank_without_elements_of_a_parameter_sends_no_codes(codec: BlockCodec):
    nothing, codes = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    assert codec.slice_nbytes(0) == 0
    codec.encode_slice(nothing, codes, 0)
    codec.encode_flat(nothing, codes)
    codec.add_slices(codes.view(2, 0), nothing)
    codec.decode_sum(codes, nothing)


@pytest.mark.parametrize("codec", [Int8Compression(), CastCompression(dtype="float8")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flat_codes_say_what_sums_say_and_leave_the_values(dtype: torch.dtype, codec: BlockCodec):
    values = torch.randn(CHUNK + 300).to(dtype)
    before, codes = values.clone(), torch.empty(codec.slice_nbytes(len(values)), dtype=torch.uint8)
    codec.encode_flat(values, codes)
    assert torch.equal(values, before)
    assert codes.numel() == codec.code_nbytes(CHUNK) + codec.code_nbytes(300)
    found = torch.empty_like(values)
    codec.decode_sum(codes, found)
    wide = values.to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(found, decoded(codec, wide, 0).to(dtype))
