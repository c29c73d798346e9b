"""Every primitive on every body: dtypes, sizes, groups over one axis and over two, one at a time and several
under way.

What must come out is computed here, from all operands at once. The other half of the contract is in
test_group.py (small whole numbers, the ledger) and test_group_edges.py (in place, scalars, what is refused).
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.group import Group, Work, World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, run_on_threads
from tests.comm.gloo_ranks import over_gloo

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS)
UNSUMMED = (torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
SIZES = (0, 1, 7)
SUMS = (
    "all_reduce",
    "reduce",
)  # of which a backend chooses the order; reduce_scatter adds in rank order everywhere
Result = dict[str, torch.Tensor]
Started = tuple[str, list[Work], torch.Tensor]


def operand(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Rank `rank`'s tensor, behind two other elements in its memory: noise, or whole numbers over the whole
    range.
    """
    generator = torch.Generator().manual_seed(rank)
    if dtype in (*INTEGERS, torch.int16):
        limits = torch.iinfo(dtype)
        return torch.randint(
            limits.min // 2, limits.max // 2, (numel + 2,), generator=generator, dtype=dtype
        )[2:]
    noise = torch.randn(numel + 2, generator=generator, dtype=torch.float64)
    return (noise > 0 if dtype == torch.bool else noise.to(dtype))[2:]


def moves(group: Group, rank: int, numel: int, dtype: torch.dtype) -> list[Callable[[], Started]]:
    """The primitives that move, each to be started by a call; those from or to one rank are from and to the
    last.
    """
    size, index, last = group.size, group.index, group.size - 1
    one, whole = partial(operand, rank, numel, dtype), partial(operand, rank, numel * size, dtype)

    def send() -> Started:
        arrived = torch.empty_like(one())
        return (
            "send",
            [
                group.send(one(), target=(index + 1) % size),
                group.recv(arrived, source=(index - 1) % size),
            ],
            arrived,
        )

    def shift() -> Started:
        arrived = torch.empty_like(one())
        return "shift", [group.shift(arrived, one(), offset=-1)], arrived

    def broadcast() -> Started:
        tensor = one()
        return "broadcast", [group.broadcast(tensor, source=last)], tensor

    def scatter() -> Started:
        output = torch.empty_like(one())
        return "scatter", [group.scatter(output, whole() if index == last else None, source=last)], output

    def gather() -> Started:
        output = torch.empty_like(whole()) if index == last else None
        return (
            "gather",
            [group.gather(output, one(), target=last)],
            torch.empty(0, dtype=dtype) if output is None else output,
        )

    def all_gather() -> Started:
        output = torch.empty_like(whole())
        return "all_gather", [group.all_gather(output, one())], output

    def all_to_all() -> Started:
        output = torch.empty_like(whole())
        return "all_to_all", [group.all_to_all(output, whole())], output

    return [send, shift, broadcast, scatter, gather, all_gather, all_to_all]


def sums(group: Group, rank: int, numel: int, dtype: torch.dtype) -> list[Callable[[], Started]]:
    """The primitives that add, each to be started by a call."""
    last = group.size - 1

    def all_reduce() -> Started:
        tensor = operand(rank, numel, dtype)
        return "all_reduce", [group.all_reduce(tensor)], tensor

    def reduce() -> Started:
        tensor = operand(rank, numel, dtype)
        work = group.reduce(tensor, target=last)
        return (
            "reduce",
            [work],
            tensor if group.index == last else torch.empty(0, dtype=dtype),
        )  # the others' is not said

    def reduce_scatter() -> Started:
        output = torch.empty_like(operand(rank, numel, dtype))
        return (
            "reduce_scatter",
            [group.reduce_scatter(output, operand(rank, numel * group.size, dtype))],
            output,
        )

    return [all_reduce, reduce, reduce_scatter]


def played(world: World, axes: tuple[str, ...], numel: int, dtype: torch.dtype, together: bool) -> Result:
    """Returns the results of all primitives: each waited for at once, or all started and waited for later."""
    group = world.group(axes)
    starts = moves(group, world.rank, numel, dtype)
    starts += sums(group, world.rank, numel, dtype) if dtype in DTYPES else []
    if not together:
        return {name: result for name, works, result in (start() for start in starts) if _wait(works)}
    started = [start() for start in starts]
    for _, works, _ in (*started[1::2], *reversed(started[::2])):
        _wait(works)
    return {name: result for name, _, result in started}


def _wait(works: list[Work]) -> bool:
    for work in works:
        work.wait()
    return True


def everything(world: World, dtype: torch.dtype, choices: tuple[tuple[str, ...], ...]) -> list[Result]:
    """`played` for every choice of axes, size and way of waiting."""
    return [
        played(world, axes, numel, dtype, together)
        for axes, numel, together in product(choices, SIZES, (False, True))
    ]


def in_order(summands: list[torch.Tensor]) -> torch.Tensor:
    """The sum from the first rank to the last, half types in float32."""
    dtype = summands[0].dtype
    total = torch.zeros_like(
        summands[0], dtype=torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    )
    for summand in summands:
        total = total + summand
    return total.to(dtype)


def right(ranks: tuple[int, ...], index: int, numel: int, dtype: torch.dtype) -> Result:
    """Returns what the rank at `index` must hold after `played`."""
    size, last = len(ranks), index == len(ranks) - 1
    ones = [operand(rank, numel, dtype) for rank in ranks]
    pieces = [operand(rank, numel * size, dtype).view(size, numel) for rank in ranks]
    none = torch.empty(0, dtype=dtype)
    found = {
        "send": ones[index - 1],
        "shift": ones[(index + 1) % size],
        "broadcast": ones[-1],
        "scatter": pieces[-1][index],
        "gather": torch.cat(ones) if last else none,
        "all_gather": torch.cat(ones),
        "all_to_all": torch.cat([piece[index] for piece in pieces]),
    }
    if dtype in DTYPES:
        total = in_order(ones)
        found |= {"all_reduce": total, "reduce": total if last else none}
        found["reduce_scatter"] = in_order([piece[index] for piece in pieces])
    return found


def check(
    mesh: Mesh,
    results: list[list[Result]],
    dtype: torch.dtype,
    choices: tuple[tuple[str, ...], ...],
    *,
    bitwise: bool,
) -> None:
    """Hold every result of every rank against what is right; sums whose order is the backend's to rounding,
    unless `bitwise`.
    """
    for which, (axes, numel, together) in enumerate(product(choices, SIZES, (False, True))):
        for ranks, index in ((peers, index) for peers in mesh.groups(axes) for index in range(len(peers))):
            expected, got = right(ranks, index, numel, dtype), results[ranks[index]][which]
            assert expected.keys() == got.keys()
            for name, tensor in expected.items():
                where = f"{name} over {axes} on rank {ranks[index]}, {numel} elements, together={together}"
                same(got[name], tensor, where, summands=0 if bitwise or name not in SUMS else len(ranks))


def same(got: torch.Tensor, expected: torch.Tensor, where: str, summands: int) -> None:
    """Hold `got` against `expected`: bit by bit, or, where `summands` of about 1 were added in some order, to
    rounding.
    """
    dtype = expected.dtype
    assert got.dtype == dtype, where
    if summands == 0 or dtype in INTEGERS:
        assert torch.equal(got.view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), where
    else:
        bound = 8 * summands * torch.finfo(dtype).eps  # every partial sum is rounded in this dtype
        assert torch.allclose(got.double(), expected.double(), rtol=0, atol=bound), where


BOTH = (("dp_shard",), ("tp",), ("dp_shard", "tp"))


@pytest.mark.parametrize("dtype", [*DTYPES, *UNSUMMED], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2, tp=2), Mesh(dp_shard=2, tp=3)], ids=str)
def test_every_primitive_on_threads_over_one_axis_and_over_two(mesh: Mesh, dtype: torch.dtype) -> None:
    check(mesh, run_on_threads(lambda world: everything(world, dtype, BOTH), mesh), dtype, BOTH, bitwise=True)


@pytest.mark.parametrize("dtype", [*DTYPES, *UNSUMMED[:-1]], ids=str)
def test_every_primitive_on_processes_over_one_axis_and_over_two(
    process_pool: ProcessPool, dtype: torch.dtype
) -> None:
    for mesh, choices in ((Mesh(dp_shard=2, tp=2), BOTH), (Mesh(dp_shard=3), BOTH[:1])):
        check(mesh, process_pool.run(everything, mesh, dtype, choices), dtype, choices, bitwise=False)
        check(
            mesh, process_pool.run(over_gloo, mesh, everything, dtype, choices), dtype, choices, bitwise=False
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fake_rank_holds_what_it_would_if_all_ranks_were_equal(dtype: torch.dtype) -> None:
    group, mine = FakeWorld(Mesh(dp_shard=3), 2).group(["dp_shard"]), operand(2, 6, dtype)
    whole, piece = mine.new_empty(18), mine.new_empty(2)
    total = mine.clone()
    group.all_reduce(total).wait()
    assert torch.equal(total, mine * 3)
    group.reduce(total.copy_(mine), target=2).wait()
    assert torch.equal(total, mine * 3)
    group.shift(total.zero_(), mine).wait()
    assert torch.equal(total, mine)
    for filled in (group.all_gather(whole.zero_(), mine), group.gather(whole.zero_(), mine, target=2)):
        filled.wait()
    assert torch.equal(whole, mine.repeat(3))
    group.scatter(piece, mine, source=2).wait()
    assert torch.equal(piece, mine[4:])
    group.reduce_scatter(piece, mine).wait()
    assert torch.equal(piece, mine[4:] * 3)


def float8_moves(world: World) -> bool:
    """Whether all moves of float8 are right here: such tensors do not pass through a pipe."""
    ranks, dtype = tuple(range(world.mesh.world_size)), UNSUMMED[-1]
    expected, got = right(ranks, world.rank, 7, dtype), played(world, ("dp_shard",), 7, dtype, together=True)
    return all(
        torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in expected.items()
    )


def test_float8_moves_between_processes(process_pool: ProcessPool) -> None:
    assert process_pool.run(float8_moves, Mesh(dp_shard=3)) == [True] * 3
