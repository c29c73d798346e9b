"""Redistributions as codes: the sums that are defined, the same bits on every rank, the bytes of the law."""

import pytest
import torch

from meshwright.comm.collectives.coded_redistribution import CodedRedistribution, coded_messages
from meshwright.comm.collectives.group import World
from meshwright.comm.collectives.redistribute import redistribute
from meshwright.parallel.compression.activation_compression import FlatCodec
from meshwright.parallel.compression.codecs.int8 import Int8Compression
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.sharding.tensor_placements import I, P, Placement, R, S, redistribution_name
from meshwright.testing.ranks import run_on_threads

CODEC = FlatCodec(Int8Compression(), "int8")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def values_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def coded(values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the codes of `values` say."""
    flat = values.reshape(-1)
    said = torch.empty_like(flat, dtype=dtype)
    CODEC.decode(CODEC.encode(flat), said)
    return said.view(values.shape)


def moved(ranks: int, shape: tuple[int, ...], src: Placement, dst: Placement, dtype: torch.dtype):
    """What each rank ends with, and the bytes that it sent."""

    def run(world: World) -> tuple[torch.Tensor, float]:
        group = world.group(("tp",))
        one = CodedRedistribution(CODEC, group, "F")
        return one.run(values_of(world.rank, shape, dtype), src, dst), world.ledger.sent_nbytes["F"]

    return run_on_threads(run, Mesh(tp=ranks))


def defined_sum(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum of what codes say, slice by slice where there are more than two ranks, in one process."""
    wide = torch.promote_types(dtype, torch.float32)
    every = [values_of(rank, shape, dtype).view(-1) for rank in range(ranks)]
    if ranks == 2:
        return sum(coded(each, wide) for each in every).to(dtype).view(shape)
    part = -(-every[0].numel() // ranks)
    filled = [torch.nn.functional.pad(each, (0, part * ranks - each.numel())) for each in every]
    slices = [each.view(ranks, part) for each in filled]
    sums = [sum(coded(each[i], wide) for each in slices) for i in range(ranks)]
    return torch.cat([coded(each, dtype) for each in sums])[: every[0].numel()].view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (5, 70)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_sum_is_that_of_codes_in_the_order_of_ranks_on_every_rank(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype
):
    expected = defined_sum(ranks, shape, dtype)
    for found, sent in moved(ranks, shape, P, I, dtype):
        assert torch.equal(found, expected)
        numel = expected.numel()
        messages = coded_messages("all_reduce", numel, ranks, CODEC.codec.slice_nbytes)
        part = -(-numel // ranks)
        law = numel + 4 * -(-numel // 256) if ranks == 2 else 2 * (ranks - 1) * (part + 4 * -(-part // 256))
        assert sent == law
        assert [name for name, _ in messages] == ["all_to_all", "all_gather"][ranks == 2 :]


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_are_gathered_scattered_and_exchanged(ranks: int):
    shape, part = (2, 6, 35), 2 * 6 * 35 // ranks
    law = (ranks - 1) * (part + 4 * -(-part // 256))
    every = [values_of(rank, shape) for rank in range(ranks)]
    for rank, (found, sent) in enumerate(moved(ranks, shape, P, S(1), torch.float64)):
        slices = [coded(each.chunk(ranks, 1)[rank]) for each in every]
        assert torch.equal(found, sum(slices))
        assert sent == law
    small = 2 * 2 * 35
    for found, sent in moved(ranks, (2, 2, 35), S(1), R, torch.float64):
        whole = [coded(values_of(rank, (2, 2, 35))) for rank in range(ranks)]
        assert torch.equal(found, torch.cat(whole, 1))
        assert sent == (ranks - 1) * (small + 4 * -(-small // 256))
    for rank, (found, sent) in enumerate(moved(ranks, shape, S(0), S(1), torch.float64)):
        slices = [coded(each.chunk(ranks, 1)[rank]) for each in every]
        assert torch.equal(found, torch.cat(slices, 0))
        assert sent == law


def test_what_moves_nothing_has_no_codes():
    assert redistribution_name(I, R) == "keep"
    assert coded_messages("keep", 12, 3, CODEC.codec.slice_nbytes) == ()
    with pytest.raises(NotImplementedError, match="sends no codes"):
        CodedRedistribution(CODEC, None, "F").run(torch.zeros(3), I, R)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_carried", [True, False])
def test_a_redistribution_is_carried_forth_and_back_or_as_it_is(*, is_carried: bool):
    def run(world: World) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
        seen = list[bool]()

        def carry(tensor, group, src, dst, action, overlap_fn, *, is_backward):
            seen.append(is_backward)
            one = CodedRedistribution(CODEC, group, action, overlap_fn)
            return one.run(tensor, src, dst) if is_carried else None

        x = values_of(world.rank, (3, 5)).requires_grad_()
        y = redistribute(x, world.group(("tp",)), S(0), R, "F", carry=carry)
        y.square().sum().backward()
        return y.detach(), x.grad, seen

    for found, gradient, seen in run_on_threads(run, Mesh(tp=3)):
        exact = torch.cat([values_of(rank, (3, 5)) for rank in range(3)])
        assert torch.equal(found, exact) != is_carried
        assert torch.allclose(found, exact, atol=0.05)
        assert gradient.shape == (3, 5)
        assert seen == [False, True]
