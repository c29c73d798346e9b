"""Edge cases of the primitives: in place, scalars, parameters, one rank, and refusals."""

from itertools import product

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import Group, World
from meshwright.plan.job.errors import PlanError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.comm.gloo_ranks import over_gloo

UNSUMMED = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)


def operand(rank: int, numel: int) -> torch.Tensor:
    """Rank `rank`'s tensor: noise."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def filled_in_place(world: World) -> dict[str, torch.Tensor]:
    """Returns the results of in-place primitives, started from and into this rank's own slice."""
    group = world.group(["dp_shard"])
    size, index = group.size, group.index
    last = index == size - 1

    def whole() -> torch.Tensor:
        return operand(world.rank, 5 * size)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(size, 5)[index]

    gathered, summed = whole(), whole()
    works = [group.all_gather(gathered, own(gathered)), group.reduce_scatter(own(summed), summed)]
    target, source = whole(), whole()
    works.append(group.gather(target if last else None, own(target), target=size - 1))
    works.append(group.scatter(own(source), source if last else None, source=size - 1))
    for work in reversed(works):
        work.wait()
    return {
        "all_gather": gathered,
        "reduce_scatter": own(summed),
        "gather": target if last else torch.empty(0),
        "scatter": own(source),
    }


def test_gathers_and_scatters_work_in_place(process_pool: ProcessPool) -> None:
    pieces = [operand(rank, 15).view(3, 5) for rank in range(3)]
    every = torch.cat([piece[rank] for rank, piece in enumerate(pieces)])
    mesh = Mesh(dp_shard=3)
    for results in (
        run_on_threads(filled_in_place, mesh),
        process_pool.run(filled_in_place, mesh),
        process_pool.run(over_gloo, mesh, filled_in_place),
    ):
        for rank, result in enumerate(results):
            assert torch.equal(result["all_gather"], every)
            assert torch.equal(result["gather"], every if rank == 2 else torch.empty(0))
            assert torch.equal(result["scatter"], pieces[2][rank])
            assert torch.equal(result["reduce_scatter"], pieces[0][rank] + pieces[1][rank] + pieces[2][rank])


def test_a_fake_rank_works_in_place() -> None:
    result = filled_in_place(FakeWorld(Mesh(dp_shard=3), 2))
    mine = operand(2, 15).view(3, 5)[2]
    assert torch.equal(result["all_gather"], mine.repeat(3))
    assert torch.equal(result["gather"], mine.repeat(3))
    assert torch.equal(result["scatter"], mine)
    assert torch.equal(result["reduce_scatter"], mine * 3)


def group_of_three() -> Group:
    return FakeWorld(Mesh(dp_shard=3), 1).group(["dp_shard"])


@pytest.mark.parametrize("offset", [0, 3, 4, 10], ids=str)
def test_any_other_overlap_is_refused(offset: int) -> None:
    group, memory = group_of_three(), torch.zeros(16)
    whole, piece = memory[:15], memory[offset : offset + 5]
    text = (
        r"over dp_shard \(rank 1 of ranks 0, 1, 2\): the local slice .* is not the slice of index "
        r"1, "
        r"its own\. Pass that slice"
    )
    for call in (
        lambda: group.all_gather(whole, piece),
        lambda: group.reduce_scatter(piece, whole),
        lambda: group.gather(whole, piece, target=1),
        lambda: group.scatter(piece, whole, source=1),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match=r"the output shares memory with the operand.*Pass another"):
        group.all_to_all(memory[1:16], memory[:15])
    assert group.ledger.sent_nbytes == {}


def test_neighbours_in_one_memory_do_not_overlap() -> None:
    group, memory = group_of_three(), torch.arange(20.0)
    group.all_gather(memory[5:20], memory[:5]).wait()
    assert torch.equal(memory, torch.arange(5.0).repeat(4))


@pytest.mark.parametrize("dtype", UNSUMMED, ids=str)
def test_a_dtype_without_a_sum_is_refused_with_those_that_have_one(dtype: torch.dtype) -> None:
    group, tensor = group_of_three(), torch.ones(3).to(dtype)
    text = (
        rf"{str(dtype).removeprefix('torch.')} cannot be summed\. Cast it to one of "
        rf"bfloat16, "
        rf"float16, float32, float64, int32"
    )
    for call in (
        lambda: group.all_reduce(tensor),
        lambda: group.all_reduce(tensor, algorithm="ring"),
        lambda: group.reduce(tensor),
        lambda: group.reduce_scatter(tensor[:1].clone(), tensor),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_a_rank_outside_the_group_is_refused_with_the_ranks() -> None:
    group, tensor = group_of_three(), torch.zeros(3)
    for index, call in product((3, -1), (group.broadcast, group.recv)):
        text = (
            rf"from index {index} .*over dp_shard \(rank 1 of ranks 0, 1, 2\): the group has "
            rf"3 "
            rf"ranks\. Name a rank from 0 to 2"
        )
        with pytest.raises(ValueError, match=text):
            call(tensor, source=index)
    for call in (group.send, group.reduce):
        with pytest.raises(ValueError, match=r"to index 7 .*Name a rank from 0 to 2, an index in the group"):
            call(tensor, target=7)


def test_a_rank_that_sends_to_itself_is_told_to_copy() -> None:
    group, tensor = group_of_three(), torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"send .* to index 1 .*: that is this rank itself\. Copy the tensor"
    ):
        group.send(tensor, target=1)
    with pytest.raises(ValueError, match=r"recv .* from index 1 .*: that is this rank itself"):
        group.recv(tensor, source=1)


def test_an_algorithm_is_refused_with_group_and_repair() -> None:
    group = group_of_three()
    with pytest.raises(PlanError, match=r"(?s)no all_reduce algorithm 'rng'.*did you mean 'ring'\?"):
        group.all_reduce(torch.zeros(3), algorithm="rng")
    with pytest.raises(PlanError, match=r"(?s)over dp_shard \(rank 1 of ranks 0, 1, 2\).*3.*repair: "):
        group.all_reduce(torch.zeros(3), algorithm="hierarchical/2")


def alone(world: World) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns what a group of one rank gives, and what it says was sent."""
    group, mine = world.group(["tp"]), operand(world.rank, 4)
    outputs = {
        name: torch.empty_like(mine)
        for name in ("all_gather", "reduce_scatter", "all_to_all", "shift", "scatter", "gather")
    }
    for algorithm in ("backend", "ring", "hierarchical/2"):
        group.all_reduce(mine, action="ALONE", algorithm=algorithm).wait()
    group.reduce(mine, action="ALONE").wait()
    group.broadcast(mine, action="ALONE").wait()
    for name, output in outputs.items():
        getattr(group, name)(output, mine, action="ALONE").wait()
    group.barrier(action="ALONE")
    return {**outputs, "mine": mine}, dict(world.ledger.sent_nbytes)


def test_an_axis_of_size_one_sends_nothing_and_records_nothing(process_pool: ProcessPool) -> None:
    mesh = Mesh(dp_shard=3)
    for results in (
        run_on_threads(alone, mesh),
        process_pool.run(alone, mesh),
        process_pool.run(over_gloo, mesh, alone),
        [alone(FakeWorld(mesh, rank)) for rank in range(3)],
    ):
        for rank, (tensors, sent) in enumerate(results):
            assert all(torch.equal(tensor, operand(rank, 4)) for tensor in tensors.values())
            assert sent == {"ALONE": 0.0}


def scalars(world: World) -> list[torch.Tensor]:
    """Tensors of no dimension: summed, broadcast, gathered, scattered, sent."""
    group = world.group(["dp_shard"])
    size, index = group.size, group.index

    def mine() -> torch.Tensor:
        return torch.tensor(10.0**world.rank)

    total, told, scattered, arrived = mine(), mine(), mine(), mine()
    gathered = torch.empty(size)
    works = [
        group.all_reduce(total),
        group.broadcast(told, source=1),
        group.all_gather(gathered, mine()),
        group.reduce_scatter(scattered, torch.arange(float(size))),
        group.send(mine(), target=(index + 1) % size),
        group.recv(arrived, source=(index - 1) % size),
    ]
    for work in works:
        work.wait()
    return [total, told, gathered, scattered, arrived]


def test_scalars_travel_like_tensors(process_pool: ProcessPool) -> None:
    mesh = Mesh(dp_shard=3)
    for results in (
        run_on_threads(scalars, mesh),
        process_pool.run(scalars, mesh),
        process_pool.run(over_gloo, mesh, scalars),
    ):
        for rank, (total, told, gathered, scattered, arrived) in enumerate(results):
            assert [total.shape, told.shape, scattered.shape, arrived.shape] == [()] * 4
            assert [total.item(), told.item(), scattered.item(), arrived.item()] == [
                111.0,
                10.0,
                3.0 * rank,
                10.0 ** ((rank - 1) % 3),
            ]
            assert gathered.tolist() == [1.0, 10.0, 100.0]


def with_gradients(world: World) -> list[tuple[torch.Tensor, bool]]:
    """Parameters and results of operations, filled in place; whether each is still a leaf that requires a
    gradient.
    """
    group = world.group(["dp_shard"])
    size = group.size
    summed, output, piece = (
        torch.nn.Parameter(torch.full((num,), float(world.rank))) for num in (3, 3 * size, 1)
    )
    operation = summed * 1  # not a leaf
    group.all_reduce(operation).wait()
    group.all_reduce(summed).wait()
    group.all_gather(output, summed).wait()
    group.reduce_scatter(piece, torch.nn.Parameter(torch.arange(float(size)))).wait()
    tensors = (summed, output, piece, operation)
    return [(tensor.detach().clone(), tensor.requires_grad and tensor.is_leaf) for tensor in tensors]


def test_tensors_that_require_gradients_are_filled_and_stay_what_they_are(process_pool: ProcessPool) -> None:
    mesh = Mesh(dp_shard=3)
    for results in (
        run_on_threads(with_gradients, mesh),
        process_pool.run(with_gradients, mesh),
        process_pool.run(over_gloo, mesh, with_gradients),
    ):
        for rank, found in enumerate(results):
            assert [leaf for _, leaf in found] == [True, True, True, False]
            expected = [
                torch.full((3,), 3.0),
                torch.full((9,), 3.0),
                torch.tensor([3.0 * rank]),
                torch.full((3,), 3.0),
            ]
            assert all(torch.equal(tensor, each) for (tensor, _), each in zip(found, expected, strict=True))
