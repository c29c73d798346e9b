"""All-reduce algorithms on processes: over real sockets, several in flight at once, awaited in any order."""

from threading import Event

import pytest
import torch

from meshwright.comm.allreduce import BACKEND
from meshwright.comm.allreduce.algorithm_as_rounds import AllReduceAlgorithm
from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.comm.allreduce.round_counts import counted, fitting

NUMELS = (0, 1, 2, 17, 10_001)


def operand(index: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * index + numel)
    return (torch.randn(numel, generator=generator) * 2.0**index).to(dtype)


def summed(world: World, dtype: torch.dtype) -> list[torch.Tensor]:
    """The totals of every algorithm but the backend's own, at every size."""
    group, totals = world.group(["dp_shard"]), []
    for algorithm in fitting(group.size):
        for numel in NUMELS if str(algorithm) != BACKEND else ():
            totals.append(operand(group.index, numel, dtype))
            group.all_reduce(totals[-1], action="TEST", algorithm=str(algorithm)).wait()
    return totals


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_processes_end_with_the_bits_that_threads_end_with(
    process_pool: ProcessPool, size: int, dtype: torch.dtype
):
    mesh = Mesh(dp_shard=size)
    expected = run_on_threads(lambda world: summed(world, dtype), mesh)
    for mine, theirs in zip(process_pool.run(summed, mesh, dtype), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def ledger_of(world: World) -> dict[str, float]:
    group = world.group(["dp_shard"])
    for algorithm in fitting(group.size):
        group.all_reduce(torch.zeros(7), action=str(algorithm), algorithm=str(algorithm)).wait()
    return dict(world.ledger.sent_nbytes)


def test_the_ledger_of_a_process_has_what_its_rounds_send(process_pool: ProcessPool):
    def expected(algorithm: AllReduceAlgorithm) -> list[int]:
        return [4 * counted(algorithm, 4, index, 7) for index in range(4)]

    ledgers = process_pool.run(ledger_of, Mesh(dp_shard=4))
    for algorithm in fitting(4):
        if str(algorithm) != BACKEND:
            assert [sent[str(algorithm)] for sent in ledgers] == expected(algorithm)


def under_way_at_once(world: World) -> tuple[list[torch.Tensor], bool]:
    """The totals of many all-reduces, sends and gathers, all started before the first wait, which comes last
    to first.
    """
    group, told = world.group(["dp_shard"]), Event()
    names = [str(algorithm) for algorithm in fitting(group.size)] * 2
    totals = [operand(group.index, 1_000 + number) for number in range(len(names))]
    works = [group.all_reduce(total, algorithm=name) for total, name in zip(totals, names, strict=True)]
    right, left = (group.index + 1) % group.size, (group.index - 1) % group.size
    passed = torch.zeros(3)
    works += [
        group.recv(passed, source=left),
        group.send(torch.full((3,), float(group.index)), target=right),
    ]
    works[-3].add_done_callback(told.set)
    for work in reversed(works):
        work.wait()
    return [*totals, passed], told.wait(30)


@pytest.mark.parametrize("size", [3, 4])
def test_several_are_under_way_at_once_and_are_waited_for_last_to_first(process_pool: ProcessPool, size: int):
    results = process_pool.run(under_way_at_once, Mesh(dp_shard=size))
    for number in range(len(results[0][0]) - 1):
        exact = torch.stack([operand(index, 1_000 + number).double() for index in range(size)]).sum(0)
        for totals, _ in results:
            assert torch.equal(totals[number], results[0][0][number])
            assert torch.allclose(totals[number].double(), exact, rtol=1e-5, atol=1e-4)
    assert [totals[-1].tolist() for totals, _ in results] == [
        [float((index - 1) % size)] * 3 for index in range(size)
    ]
    assert all(told for _, told in results)


def progress_without_a_waiter(world: World) -> tuple[bool, torch.Tensor]:
    """Whether the lane's own thread plays what nobody waits for, behind a work that is waited for."""
    group, over = world.group(["dp_shard"]), Event()
    first, second = operand(group.index, 50), operand(group.index, 60)
    waited, left = (
        group.all_reduce(first, algorithm="ring"),
        group.all_reduce(second, algorithm="recursive_halving"),
    )
    left.add_done_callback(over.set)
    waited.wait()
    return over.wait(30), second


def test_works_without_a_waiter_make_progress(process_pool: ProcessPool):
    results = process_pool.run(progress_without_a_waiter, Mesh(dp_shard=3))
    assert [over for over, _ in results] == [True] * 3
    assert all(torch.equal(total, results[0][1]) for _, total in results)


def by_two_names_of_the_same_ranks(world: World) -> list[torch.Tensor]:
    """The totals of two groups that are the same ranks: each has its own lane, and their messages must not be
    mixed up.
    """
    one, other = world.group(["dp_shard"]), world.group(["dp_shard", "tp"])
    totals = [operand(world.rank, 5_000 + number % 2) for number in range(20)]
    works = [
        (one if number % 2 else other).all_reduce(total, algorithm="ring" if number % 3 else "one_shot")
        for number, total in enumerate(totals)
    ]
    for work in works if world.rank % 2 else reversed(works):
        work.wait()
    return totals


def test_two_groups_of_the_same_ranks_do_not_take_each_others_messages(process_pool: ProcessPool):
    for number, totals in enumerate(
        zip(*process_pool.run(by_two_names_of_the_same_ranks, Mesh(dp_shard=3)), strict=True)
    ):
        exact = torch.stack([operand(rank, 5_000 + number % 2).double() for rank in range(3)]).sum(0)
        assert all(torch.equal(total, totals[0]) for total in totals)
        assert torch.allclose(totals[0].double(), exact, rtol=1e-5, atol=1e-4)
