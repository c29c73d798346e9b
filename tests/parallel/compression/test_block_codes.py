"""Sums of codes over ranks: the bytes of the law in the ledger, and the same bits on every rank."""

import pytest
import torch

from meshwright.comm.collectives.group import ExchangedMessage, World
from meshwright.parallel.compression.block_codes import CHUNK, in_blocks, slice_numel
from meshwright.parallel.compression.int4 import Int4Compression
from meshwright.parallel.compression.int8 import Int8Compression
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import coded_sum, decoded

AXIS = ("dp_replicate",)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_rank_sends_the_bytes_of_the_law(size: int, collective: str):
    codec, numel = Int8Compression(), 6 * 1000
    summed = coded_sum(torch.empty(numel), size, collective)
    messages = codec.messages(summed)

    def exchange(world: World) -> tuple[float, torch.Tensor]:
        values = torch.randn(numel, generator=torch.Generator().manual_seed(world.rank))
        part = slice_numel(numel, size)
        scatters = collective == "reduce_scatter"
        output = torch.empty(part) if scatters else values
        operand = CodedOperand(summed, values, {}, output, world.rank, key=world.rank)
        sent = [ExchangedMessage(each.collective, each.nbytes, each.dtype) for each in messages]
        world.group(AXIS).exchange(codec.sum_rounds(operand), sent, action="REDUCE").wait()
        return world.ledger.sent_nbytes["REDUCE"], output

    found = run_on_threads(exchange, Mesh(dp_replicate=size))
    part = numel // size
    law = (size - 1) * (part + 4 * -(-part // 256))
    assert [sent for sent, _ in found] == [law * (2 if collective == "all_reduce" else 1)] * size
    inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    total = sum(inputs)
    for rank, (_, output) in enumerate(found):
        if collective == "all_reduce":
            assert torch.equal(output, found[0][1]), "the same bits on every rank"
        expected = total if collective == "all_reduce" else total[rank * part : (rank + 1) * part]
        assert (output - expected).abs().max() < 0.1


def test_slices_of_many_chunks_have_the_bytes_of_their_chunks():
    codec = Int4Compression()
    numel = 2 * CHUNK + 3
    assert codec._slice_nbytes(numel) == 2 * codec.code_nbytes(CHUNK) + codec.code_nbytes(3)
    values = torch.randn(numel)
    whole = decoded(codec, values, key=0)
    parts = [decoded(codec, each, key=0) for each in values.split(CHUNK)]
    assert torch.equal(whole, torch.cat(parts))


def test_blocks_are_padded_with_zeros():
    assert in_blocks(torch.ones(5), 4).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]
    assert slice_numel(7, 3) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_flat_codes_say_what_sums_say_and_leave_the_values(dtype: torch.dtype):
    codec, values = Int8Compression(), torch.randn(CHUNK + 300).to(dtype)
    before, codes = values.clone(), torch.empty(codec.flat_nbytes(len(values)), dtype=torch.uint8)
    codec.encode_flat(values, codes)
    assert torch.equal(values, before)
    assert codes.numel() == codec.code_nbytes(CHUNK) + codec.code_nbytes(300)
    found = torch.empty_like(values)
    codec.decode_flat(codes, found)
    wide = values.to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(found, decoded(codec, wide, 0).to(dtype))
