"""The contract of a group, on threads, processes and the fake world, against a dense reference.

The reference computes what every rank must hold from all operands at once. Operands are small whole numbers,
so that every sum is exact in every dtype and results are compared bit by bit.
"""

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import Group, World
from meshwright.comm.collectives.ledger import Ledger
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "shift",
    "scatter",
    "gather",
    "reduce",
)
WHOLE = ("reduce_scatter", "all_to_all", "scatter")  # the operand holds a piece for every rank
NOTHING = torch.empty(0)


def operand(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank `rank`'s tensor: whole numbers from -8 to 8."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)


def issue(group: Group, collective: str, tensor: torch.Tensor) -> torch.Tensor:
    """The result of `collective` on this rank; those from or to one rank are from and to the last."""
    size = group.size
    last = group.index == size - 1
    match collective:
        case "all_reduce":
            group.all_reduce(tensor, action="TEST").wait()
            return tensor
        case "broadcast":
            group.broadcast(tensor, source=size - 1, action="TEST").wait()
            return tensor
        case "scatter":
            output = tensor.new_empty(tensor.numel() // size)
            group.scatter(output, tensor if last else None, source=size - 1, action="TEST").wait()
            return output
        case "gather":
            gathered = tensor.new_empty(size * tensor.numel()) if last else None
            group.gather(gathered, tensor, target=size - 1, action="TEST").wait()
            return NOTHING.to(tensor.dtype) if gathered is None else gathered
        case "reduce":
            group.reduce(tensor, target=size - 1, action="TEST").wait()
            return tensor if last else NOTHING.to(tensor.dtype)  # what the others hold is not said
        case "all_gather":
            output = tensor.new_empty(size * tensor.numel())
        case "reduce_scatter":
            output = tensor.new_empty(tensor.numel() // size)
        case _:
            output = torch.empty_like(tensor)
    getattr(group, collective)(output, tensor, action="TEST").wait()
    return output


def expected(collective: str, operands: list[torch.Tensor], index: int) -> torch.Tensor:
    """Returns what the rank at `index` must hold."""
    size, last = len(operands), index == len(operands) - 1
    pieces = (
        [tensor.view(size, tensor.numel() // size) for tensor in operands]
        if operands[0].numel() % size == 0
        else []
    )
    return {
        "all_reduce": lambda: torch.stack(operands).double().sum(0).to(operands[0].dtype),
        "all_gather": lambda: torch.cat(operands),
        "reduce_scatter": lambda: (
            torch.stack([piece[index] for piece in pieces]).double().sum(0).to(operands[0].dtype)
        ),
        "all_to_all": lambda: torch.cat([piece[index] for piece in pieces]),
        "broadcast": lambda: operands[-1],
        "shift": lambda: operands[index - 1],
        "scatter": lambda: pieces[-1][index],
        "gather": lambda: torch.cat(operands) if last else NOTHING.to(operands[0].dtype),
        "reduce": lambda: (
            torch.stack(operands).double().sum(0).to(operands[0].dtype)
            if last
            else NOTHING.to(operands[0].dtype)
        ),
    }[collective]()


def all_collectives(
    world: World, axes: tuple[str, ...], numel: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The result of every collective over `axes`, with `numel` elements per rank (times the size where it
    must divide).
    """
    group = world.group(axes)
    sizes = {name: numel * group.size if name in WHOLE else numel for name in COLLECTIVES}
    return {name: issue(group, name, operand(world.rank, sizes[name], dtype)) for name in COLLECTIVES}


def all_expected(
    ranks: tuple[int, ...], index: int, numel: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns what `all_collectives` must return on the rank at `index` of `ranks`."""
    sizes = {name: numel * len(ranks) if name in WHOLE else numel for name in COLLECTIVES}
    return {
        name: expected(name, [operand(rank, sizes[name], dtype) for rank in ranks], index)
        for name in COLLECTIVES
    }


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def same(
    results: list[dict[str, torch.Tensor]], ranks: tuple[int, ...], numel: int, dtype: torch.dtype
) -> None:
    for index, result in enumerate(results):
        for name, tensor in all_expected(ranks, index, numel, dtype).items():
            assert result[name].dtype == dtype
            assert torch.equal(result[name], tensor), f"{name} on rank {ranks[index]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_every_collective_on_threads_equals_the_dense_reference(
    size: int, numel: int, dtype: torch.dtype
) -> None:
    mesh = Mesh(dp_shard=size)
    results = run_on_threads(lambda world: all_collectives(world, ("dp_shard",), numel, dtype), mesh)
    same(results, tuple(range(size)), numel, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_collective_on_processes_equals_the_dense_reference(
    process_pool: ProcessPool, dtype: torch.dtype
) -> None:
    for numel in (7, 0):
        same(
            process_pool.run(all_collectives, Mesh(dp_shard=3), ("dp_shard",), numel, dtype),
            (0, 1, 2),
            numel,
            dtype,
        )


def both_axes(world: World) -> list[dict[str, torch.Tensor]]:
    return [
        all_collectives(world, axes, 3, torch.float64)
        for axes in (("dp_shard",), ("tp",), ("dp_shard", "tp"), ("pp",))
    ]


def test_groups_of_a_2d_mesh_on_threads_have_the_peers_along_their_axes() -> None:
    mesh_groups_are_right(Mesh(dp_shard=2, tp=3), run_on_threads(both_axes, Mesh(dp_shard=2, tp=3)))


def test_groups_of_a_2d_mesh_on_processes_have_the_peers_along_their_axes(process_pool: ProcessPool) -> None:
    mesh_groups_are_right(Mesh(dp_shard=2, tp=2), process_pool.run(both_axes, Mesh(dp_shard=2, tp=2)))


def mesh_groups_are_right(mesh: Mesh, results: list[list[dict[str, torch.Tensor]]]) -> None:
    for which, axes in enumerate((("dp_shard",), ("tp",), ("dp_shard", "tp"), ("pp",))):
        for ranks in mesh.groups(axes):
            same([results[rank][which] for rank in ranks], ranks, 3, torch.float64)


def issue_together(world: World) -> torch.Tensor:
    group = world.group(["dp_shard"])
    tensors = [torch.full((5,), float(world.rank + k)) for k in range(4)]
    outputs = [torch.empty(15) for _ in tensors]
    under_way = [group.all_gather(output, tensor) for output, tensor in zip(outputs, tensors, strict=True)]
    for work in reversed(under_way):
        work.wait()
        work.wait()  # a second wait returns at once
    return torch.stack(outputs)


def test_collectives_under_way_together_are_waited_for_in_any_order(process_pool: ProcessPool) -> None:
    right = torch.stack([(torch.arange(3.0) + k).repeat_interleave(5) for k in range(4)])
    for results in (
        run_on_threads(issue_together, Mesh(dp_shard=3)),
        process_pool.run(issue_together, Mesh(dp_shard=3)),
    ):
        assert all(torch.equal(result, right) for result in results)


def sum_of_noise(world: World) -> tuple[torch.Tensor, torch.Tensor]:
    group = world.group(["dp_shard"])
    noise = torch.randn(3 * 1001, generator=torch.Generator().manual_seed(world.rank))
    piece = torch.empty(1001)
    group.reduce_scatter(piece, noise).wait()
    group.all_reduce(noise).wait()
    pieces = torch.empty(3 * 1001)
    group.all_gather(pieces, piece).wait()
    return noise, pieces


def test_a_sum_has_the_same_bits_on_every_rank(process_pool: ProcessPool) -> None:
    for results in (
        run_on_threads(sum_of_noise, Mesh(dp_shard=3)),
        process_pool.run(sum_of_noise, Mesh(dp_shard=3)),
    ):
        for total, pieces in results:
            assert torch.equal(total, results[0][0])
            assert torch.equal(pieces, results[0][1])


def test_a_sum_on_threads_and_a_scattered_sum_on_processes_add_in_rank_order(
    process_pool: ProcessPool,
) -> None:
    noise = [torch.randn(3 * 1001, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    in_order = (noise[0] + noise[1]) + noise[2]
    assert not torch.equal(in_order, noise[0] + (noise[1] + noise[2]))  # or this test could not fail
    assert all(torch.equal(total, in_order) for total, _ in run_on_threads(sum_of_noise, Mesh(dp_shard=3)))
    assert all(
        torch.equal(pieces, in_order) for _, pieces in process_pool.run(sum_of_noise, Mesh(dp_shard=3))
    )


def booked(world: World) -> list[tuple[str, str, tuple[str, ...], int, int, float]]:
    world.ledger.is_recording = True
    all_collectives(world, ("dp_shard",), 7, torch.bfloat16)
    world.group(["dp_shard"]).barrier(action="END")
    return [
        (e.action, e.collective, e.axes, e.group_size, e.nbytes, e.sent_nbytes) for e in world.ledger.entries
    ]


def test_all_bodies_book_the_same_bytes_by_the_formula(process_pool: ProcessPool) -> None:
    last = [
        ("TEST", "all_reduce", ("dp_shard",), 3, 14, 2 * 14 * 2 / 3),
        ("TEST", "all_gather", ("dp_shard",), 3, 14, 28),
        ("TEST", "reduce_scatter", ("dp_shard",), 3, 42, 28),
        ("TEST", "all_to_all", ("dp_shard",), 3, 42, 28),
        ("TEST", "broadcast", ("dp_shard",), 3, 14, 14),
        ("TEST", "shift", ("dp_shard",), 3, 14, 14),
        ("TEST", "scatter", ("dp_shard",), 3, 14, 28),
        ("TEST", "gather", ("dp_shard",), 3, 14, 0),
        ("TEST", "reduce", ("dp_shard",), 3, 14, 0),
        ("END", "barrier", ("dp_shard",), 3, 0, 0),
    ]
    sent = {"broadcast": 0.0, "scatter": 0.0, "gather": 14.0, "reduce": 14.0}  # by a rank that is not the one
    other = [(*entry[:5], sent.get(entry[1], entry[5])) for entry in last]
    mesh = Mesh(dp_shard=3)
    for books in (
        run_on_threads(booked, mesh),
        process_pool.run(booked, mesh),
        [booked(FakeWorld(mesh, rank)) for rank in range(3)],
    ):
        assert books == [other, other, last]


def weights_from_the_last(world: World) -> tuple[torch.Tensor, bool]:
    weight = torch.nn.Parameter(torch.full((2, 2), float(world.rank)))
    world.group(["dp_shard"]).broadcast(weight, source=2).wait()
    return weight.detach(), weight.is_leaf


def test_a_parameter_can_be_broadcast_in_place(process_pool: ProcessPool) -> None:
    for results in (
        run_on_threads(weights_from_the_last, Mesh(dp_shard=3)),
        process_pool.run(weights_from_the_last, Mesh(dp_shard=3)),
    ):
        assert all(torch.equal(weight, torch.full((2, 2), 2.0)) and is_leaf for weight, is_leaf in results)


def same_objects(world: World) -> bool:
    return world.group(["tp", "dp_shard"]) is world.group(("dp_shard", "tp")) and world.group(
        ["tp"]
    ) is not world.group(["dp_shard"])


def test_equal_axes_are_the_same_group_object(process_pool: ProcessPool) -> None:
    mesh = Mesh(dp_shard=2, tp=2)
    assert run_on_threads(same_objects, mesh) == process_pool.run(same_objects, mesh) == [True] * 4
    assert same_objects(FakeWorld(mesh, 3))


@pytest.mark.parametrize("before", [False, True])
def test_a_pause_of_recording_ends_as_it_began(before: bool):
    ledger = Ledger(is_recording=before)
    with ledger.pause_recording():
        assert not ledger.is_recording
    assert ledger.is_recording == before
