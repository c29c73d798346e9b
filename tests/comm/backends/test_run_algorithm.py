"""Results of every all-reduce algorithm: the same bits on every rank, and planted mistakes that tests
notice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import pytest
import torch

from meshwright.comm.allreduce import BACKEND, get_algorithm
from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm, ChunkMessage, Round
from meshwright.comm.allreduce.one_shot import OneShotAllReduce
from meshwright.comm.allreduce.ring import RingAllReduce
from meshwright.comm.backends import run_algorithm
from meshwright.comm.backends.run_algorithm import PeerTensors, run_all_ranks
from meshwright.comm.collectives.group import World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import run_on_threads
from tests.comm.allreduce.round_counts import CASES, counted, fitting, numels

WIDE = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
WHOLE = (torch.int64, torch.int32, torch.uint8)


def operands(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The tensors of all ranks: random, of magnitudes that make the order of a sum show."""
    generator = torch.Generator().manual_seed(size * 1000 + numel)
    if dtype in WHOLE:
        return [torch.randint(0, 200, (numel,), generator=generator).to(dtype) for _ in range(size)]
    scales = 2.0 ** torch.arange(size)[torch.randperm(size, generator=generator)]
    return [(torch.randn(numel, generator=generator) * scale).to(dtype) for scale in scales]


def same_bits(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


def close(total: torch.Tensor, summands: list[torch.Tensor]) -> bool:
    """Whether `total` is the sum but for roundings: one per summand,
    each relative to the sum of magnitudes.
    """
    if total.dtype in WHOLE:
        return torch.equal(total, torch.stack(summands).sum(0, dtype=total.dtype))
    exact = torch.stack(summands).double()
    room = WIDE[total.dtype] * exact.abs().sum(0) * len(summands)
    return bool(((total.double() - exact.sum(0)).abs() <= room).all())


@pytest.mark.parametrize(("algorithm", "size"), CASES, ids=str)
def test_all_ranks_end_with_the_sum_in_the_same_bits(algorithm: AllReduceAlgorithm, size: int):
    for numel in numels(size):
        summands = operands(size, numel)
        totals = [summand.clone() for summand in summands]
        run_all_ranks(algorithm, totals)
        assert same_bits(totals), numel
        assert close(totals[0], summands), numel


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("dtype", [*WIDE, *WHOLE], ids=str)
def test_every_dtype_is_summed_on_threads(size: int, dtype: torch.dtype):
    names = [str(algorithm) for algorithm in fitting(size)]
    summands = operands(size, 17, dtype)

    def body(world: World) -> list[torch.Tensor]:
        group, totals = world.group(["dp_shard"]), []
        for name in names:
            totals.append(summands[group.index].clone())
            group.all_reduce(totals[-1], action="TEST", algorithm=name).wait()
        return totals

    for name, totals in zip(names, zip(*run_on_threads(body, Mesh(dp_shard=size)), strict=True), strict=True):
        assert same_bits(list(totals)), name
        assert totals[0].dtype == dtype
        assert close(totals[0], summands), name


@pytest.mark.parametrize("size", [3, 4])
def test_the_ledger_has_what_each_rank_sends(size: int):
    def body(world: World) -> dict[str, float]:
        group = world.group(["dp_shard"])
        for algorithm in fitting(size):
            group.all_reduce(torch.zeros(7), action=str(algorithm), algorithm=str(algorithm)).wait()
        return dict(world.ledger.sent_nbytes)

    ledgers = run_on_threads(body, Mesh(dp_shard=size))
    for algorithm in fitting(size):
        if str(algorithm) != BACKEND:
            assert [sent[str(algorithm)] for sent in ledgers] == [
                4 * counted(algorithm, size, index, 7) for index in range(size)
            ]


def test_a_tensor_of_any_contiguous_shape_is_summed_in_place():
    def body(world: World) -> torch.Tensor:
        tensor = torch.full((2, 3, 5), float(world.rank + 1))
        world.group(["dp_shard"]).all_reduce(tensor, algorithm="recursive_halving").wait()
        return tensor

    for total in run_on_threads(body, Mesh(dp_shard=3)):
        assert torch.equal(total, torch.full((2, 3, 5), 6.0))


@pytest.mark.parametrize("algorithm", fitting(4), ids=str)
def test_what_is_not_contiguous_is_refused(algorithm: AllReduceAlgorithm):
    def body(world: World) -> None:
        world.group(["dp_shard"]).all_reduce(torch.zeros(2, 3).T, algorithm=str(algorithm))

    with pytest.raises(ValueError, match=r"not contiguous.*Pass tensor\.contiguous\(\)"):
        run_on_threads(body, Mesh(dp_shard=4))


def test_an_algorithm_that_cannot_run_in_a_group_is_refused_with_those_that_can():
    def body(world: World) -> None:
        world.group(["dp_shard"]).all_reduce(torch.zeros(6), algorithm="hierarchical/4")

    with pytest.raises(
        PlanError,
        match=r"(?s)6 ranks are not a whole number of hosts with 4 .*write hierarchical/2 or hierarchical/3",
    ):
        run_on_threads(body, Mesh(dp_shard=6))


def test_naive_root_and_parallel_sum_in_the_order_of_the_ranks():
    summands = [torch.tensor([value]) for value in (1e8, 1.0, -1e8)]  # 0 in this order, 1 in some others
    by_order = {
        order: sum((summands[i] for i in order[1:]), summands[order[0]].clone()).item()
        for order in permutations(range(3))
    }
    assert set(by_order.values()) == {0.0, 1.0}
    for name in ("naive", "reduce_broadcast", "one_shot"):
        totals = [summand.clone() for summand in summands]
        run_all_ranks(get_algorithm(name), totals)
        assert [total.item() for total in totals] == [by_order[0, 1, 2]] * 3


def test_half_types_that_meet_in_one_round_are_rounded_once():
    summands = [
        torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9)
    ]
    run_all_ranks(get_algorithm("one_shot"), summands)
    assert [total.item() for total in summands] == [
        1.0 + 2.0**-7
    ] * 5  # one by one, each would be rounded away


@dataclass(frozen=True)
class Turned(AllReduceAlgorithm):
    """A ring whose chunks go round the wrong way: right among two ranks, and wrong among three."""

    name: ClassVar[str] = "turned"

    def num_chunks(self, size: int) -> int:
        return size

    def rounds(self, size: int, index: int) -> tuple[Round, ...]:
        right, left = (index + 1) % size, (index - 1) % size
        collect = [
            Round(
                (ChunkMessage(right, ((index + 1 + step) % size,)),),
                (ChunkMessage(left, ((index + step) % size,)),),
                accumulate=True,
            )
            for step in range(size - 1)
        ]
        return (*collect, *RingAllReduce().rounds(size, index)[size - 1 :])

    def num_rounds(self, size: int) -> int:
        return RingAllReduce().num_rounds(size)

    def num_sent(self, size: int, index: int, numel: int) -> int:
        return RingAllReduce().num_sent(size, index, numel)

    def seconds(self, size: int, nbytes: int, latency_s: float, bytes_per_s: float) -> float:
        return RingAllReduce().seconds(size, nbytes, latency_s, bytes_per_s)


def test_a_ring_turned_the_wrong_way_passes_at_two_ranks_and_fails_at_three():
    test_all_ranks_end_with_the_sum_in_the_same_bits(Turned(), 2)
    with pytest.raises(AssertionError):
        test_all_ranks_end_with_the_sum_in_the_same_bits(Turned(), 3)


Sum = Callable[[list[torch.Tensor]], torch.Tensor]


def own_first(ordered: Sum, own: list[torch.Tensor]) -> Sum:
    """A sum that begins with the summand of the rank that computes it."""

    def summed(summands: list[torch.Tensor]) -> torch.Tensor:
        mine = [each for each in summands if any(each.data_ptr() == other.data_ptr() for other in own)]
        return ordered([*mine, *(each for each in summands if not any(each is other for other in mine))])

    return summed


def test_ranks_that_begin_with_their_own_summand_differ_in_bits(monkeypatch: pytest.MonkeyPatch):
    totals = operands(3, 101)
    monkeypatch.setattr(run_algorithm, "ordered_sum", own_first(run_algorithm.ordered_sum, totals))
    run_all_ranks(OneShotAllReduce(), totals)
    assert not same_bits(totals)


def test_a_parcel_that_nobody_receives_is_noticed():
    @dataclass(frozen=True)
    class Lost(Turned):
        def rounds(self, size: int, index: int) -> tuple[Round, ...]:
            return tuple(
                Round(each.sends, (), each.accumulate) for each in RingAllReduce().rounds(size, index)
            )

    with pytest.raises(
        RuntimeError, match=r"turned among 3 ranks: no rank receives what \[\(0, 1\), \(1, 2\), \(2, 0\)\]"
    ):
        run_all_ranks(Lost(), operands(3, 7))


def parts(
    algorithm: AllReduceAlgorithm, size: int, index: int, numel: int
) -> list[tuple[PeerTensors, PeerTensors]]:
    return list(run_algorithm.run_rounds(algorithm, size, index, torch.zeros(numel)))


def test_copied_parcels_arrive_in_place_and_added_ones_in_scratch_memory():
    flat = torch.zeros(9)
    inside = [
        [tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for _, tensor in receives]
        for _, receives in run_algorithm.run_rounds(RingAllReduce(), 3, 1, flat)
    ]
    assert inside == [[False], [False], [True], [True]]


def test_empty_parcels_are_not_sent():
    assert all(not sends and not receives for sends, receives in parts(RingAllReduce(), 4, 2, 0))
    sent = [sends for index in range(4) for sends, _ in parts(RingAllReduce(), 4, index, 1)]
    assert (
        sum(map(len, sent)) == 6
    )  # one chunk holds the one element: summed in three rounds, handed on in three
