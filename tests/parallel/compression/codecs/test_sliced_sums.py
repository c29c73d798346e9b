"""Sums of codes over ranks: the bytes of the law in the ledger, and the same bits on every rank."""

import pytest
import torch

from meshwright.comm.collectives.group import ExchangedMessage, World
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.parallel.compression.codecs.sliced_sums import slice_numel
from meshwright.parallel.compression.residuals import CodedOperand
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.parallel.compression.coded_plans import coded_sum

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


def test_the_last_slice_is_the_shortest():
    assert [slice_numel(numel, 3) for numel in (0, 1, 6, 7)] == [0, 1, 2, 3]
