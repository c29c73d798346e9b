"""Shared-memory groups against the same calls on threads: every bit, at every boundary of slot and chunk."""

import gc
import hashlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from meshwright.comm.collectives.group import Group, Work, World
from meshwright.comm.shared_memory.shared_memory_group import (
    MAX_SLOT_NBYTES,
    NUM_PLACES,
    SUMMABLE_DTYPES,
    SharedMemoryGroup,
)
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
AREA = 1 << 20  # bytes of a chunk, as in chunks.h


def noise(seed: object, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order; of integers, such that sums wrap around."""
    generator = torch.Generator().manual_seed(random.Random(repr(seed)).randrange(2**31))
    if dtype.is_floating_point:
        return (torch.randn(numel, generator=generator, dtype=torch.float64) * 100).to(dtype)
    return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(dtype)


def issue(
    group: Group, collective: str, tensor: torch.Tensor, one: int = 0
) -> tuple[Work, torch.Tensor | None]:
    """The work, and what will hold the result on this rank; None where it says nothing."""
    size, mine = group.size, group.index == one
    if collective == "all_reduce":
        return group.all_reduce(tensor), tensor
    if collective == "broadcast":
        return group.broadcast(tensor, source=one), tensor
    if collective == "reduce":
        return group.reduce(tensor, target=one), tensor if mine else None
    if collective == "scatter":
        output = tensor.new_empty(tensor.numel() // size)
        return group.scatter(output, tensor if mine else None, source=one), output
    if collective == "gather":
        gathered = tensor.new_empty(size * tensor.numel()) if mine else None
        return group.gather(gathered, tensor, target=one), gathered
    if collective == "shift":
        output = torch.empty_like(tensor)
        return group.shift(output, tensor, offset=one), output
    numel = {"all_gather": tensor.numel() * size, "reduce_scatter": tensor.numel() // size}.get(
        collective, tensor.numel()
    )
    output = tensor.new_empty(numel)
    return getattr(group, collective)(output, tensor), output


def digest(tensor: torch.Tensor | None) -> str:
    return (
        ""
        if tensor is None
        else hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    )


def all_collectives(world: World, numels: tuple[int, ...], dtype: torch.dtype) -> dict[str, str]:
    """The digest of the result of every collective on this rank."""
    torch.set_num_threads(1)
    group, found = world.group(["dp_shard"]), {}
    for numel in numels:
        for one, name in enumerate(COLLECTIVES):
            operand = noise((world.rank, numel, name), numel * group.size if name in WHOLE else numel, dtype)
            work, result = issue(group, name, operand, one % group.size)
            work.wait()
            found[f"{name} of {numel}"] = digest(result)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", SUMMABLE_DTYPES, ids=str)
def test_every_collective_has_the_bits_of_threads(
    process_pool: ProcessPool, size: int, dtype: torch.dtype
) -> None:
    numels = (1, 7, 33, MAX_SLOT_NBYTES // dtype.itemsize // 3 + 1, MAX_SLOT_NBYTES // dtype.itemsize + 1)
    mesh = Mesh(dp_shard=size)
    assert process_pool.run(all_collectives, mesh, numels, dtype) == run_on_threads(
        lambda world: all_collectives(world, numels, dtype), mesh
    )


@pytest.mark.parametrize("size", [2, 3, 4])
def test_boundaries_of_slots_and_chunks_are_right(process_pool: ProcessPool, size: int) -> None:
    slot, chunk = MAX_SLOT_NBYTES // 4, AREA // 4
    pieces = tuple(
        {slot // size + step for step in (-1, 0, 1)}
        | {chunk // size // 16 * 16 + step for step in (-1, 0, 1)}
    )
    numels = (slot - 1, slot, slot + 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk + 5, *pieces)
    mesh = Mesh(dp_shard=size)
    assert process_pool.run(all_collectives, mesh, numels, torch.float32) == run_on_threads(
        lambda world: all_collectives(world, numels, torch.float32), mesh
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex128, torch.int16], ids=str)
def test_what_is_only_moved_may_be_of_any_dtype(process_pool: ProcessPool, dtype: torch.dtype) -> None:
    mesh, results = Mesh(dp_shard=3), []
    for numel in (5, MAX_SLOT_NBYTES + 5):
        right = [noise((rank, numel, "any"), numel, torch.int64).to(dtype) for rank in range(3)]
        results = process_pool.run(gathered, mesh, numel, dtype)
        assert results == [digest(torch.cat(right))] * 3


def gathered(world: World, numel: int, dtype: torch.dtype) -> str:
    work, result = issue(
        world.group(["dp_shard"]),
        "all_gather",
        noise((world.rank, numel, "any"), numel, torch.int64).to(dtype),
    )
    work.wait()
    return digest(result)


def in_memory(world: World) -> bool:
    return all(
        isinstance(world.group(axes), SharedMemoryGroup)
        for axes in (["dp_shard"], ["tp"], ["dp_shard", "tp"])
    )


def test_the_ranks_of_a_pool_share_memory_unless_told_otherwise(process_pool: ProcessPool) -> None:
    assert process_pool.run(in_memory, Mesh(dp_shard=2, tp=2)) == [True] * 4
    with ProcessPool(shared_memory=False) as sockets:
        assert sockets.run(in_memory, Mesh(dp_shard=2, tp=2)) == [False] * 4


def program(seed: int) -> Iterator[tuple[str, str, int, int]]:
    """Yields which group, what, how many elements, from or to whom: the same on every rank."""
    chosen = random.Random(seed)
    for _ in range(60):
        numel = chosen.choice(
            (
                1,
                5,
                100,
                MAX_SLOT_NBYTES // 16,
                MAX_SLOT_NBYTES // 8,
                MAX_SLOT_NBYTES // 4 + 3,
                AREA // 8,
                AREA // 2 + 1,
            )
        )
        yield (
            chosen.choice(("dp_shard", "tp", "both")),
            chosen.choice(COLLECTIVES),
            numel,
            chosen.randrange(2),
        )


def any_order(world: World, seeds: range) -> list[str]:
    """Digests of what a random program computes, waited for in an order that is this rank's own, with many
    under way.
    """
    torch.set_num_threads(1)
    groups = {
        "dp_shard": world.group(["dp_shard"]),
        "tp": world.group(["tp"]),
        "both": world.group(["dp_shard", "tp"]),
    }
    found = []
    for seed in seeds:
        own = random.Random(seed * 1000 + world.rank)
        results: list[torch.Tensor | None] = []
        under_way: list[Work] = []
        for k, (axes, name, numel, one) in enumerate(program(seed)):
            group = groups[axes]
            work, result = issue(
                group,
                name,
                noise((world.rank, seed, k), numel * (group.size if name in WHOLE else 1), torch.float32),
                one,
            )
            results.append(result)
            under_way.append(work)
            while under_way and own.random() < 0.4:
                under_way.pop(own.randrange(len(under_way))).wait()
        own.shuffle(under_way)
        for work in under_way:
            work.wait()
        found.append(" ".join(map(digest, results)))
    return found


def test_works_may_be_waited_for_in_any_order_over_several_groups(process_pool: ProcessPool) -> None:
    mesh, seeds = Mesh(dp_shard=2, tp=2), range(6)
    assert process_pool.run(any_order, mesh, seeds, timeout_s=110.0) == run_on_threads(
        lambda world: any_order(world, seeds), mesh
    )


def reduce_before_a_message(world: World, num_before: int) -> float:
    """Rank 0 issues, then sends; rank 1 needs the message before it issues the rest."""
    group, word = world.group(["dp_shard"]), torch.ones(1)
    tensors = [torch.full((3,), float(k)) for k in range(3 * NUM_PLACES)]
    if world.rank == 0:
        works = [group.all_reduce(tensor) for tensor in tensors]
        group.send(word, target=1).wait()
    else:
        works = [group.all_reduce(tensor) for tensor in tensors[:num_before]]
        group.recv(word, source=0).wait()
        works += [group.all_reduce(tensor) for tensor in tensors[num_before:]]
    for work in reversed(works):
        work.wait()
    return sum(float(tensor.sum()) for tensor in tensors)


@pytest.mark.parametrize("num_before", [0, 1, NUM_PLACES, NUM_PLACES + 1, 3 * NUM_PLACES])
def test_issuing_waits_for_nobody_however_many_are_under_way(
    process_pool: ProcessPool, num_before: int
) -> None:
    right = 2 * 3 * sum(range(3 * NUM_PLACES))
    assert process_pool.run(reduce_before_a_message, Mesh(dp_shard=2), num_before) == [right] * 2


class Alarm(Exception):
    """The exception that a signal handler raises."""


def interrupted(world: World, numel: int) -> tuple[bool, float]:
    """Rank 0 waits for a rank that does not come before it has had its signal, and then waits again."""
    group, word, tensor, rang = world.group(["dp_shard"]), torch.ones(1), torch.ones(numel), False

    def ring(number: int, frame: object) -> None:
        raise Alarm

    if world.rank == 1:
        group.recv(word, source=0).wait()
        group.all_reduce(tensor).wait()
        return True, float(tensor.sum())
    work = group.all_reduce(tensor)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        work.wait()
    except Alarm:
        rang = True
    group.send(word, target=1).wait()
    work.wait()
    return rang, float(tensor.sum())


def test_a_signal_is_handled_in_a_wait_that_continues_afterwards(process_pool: ProcessPool) -> None:
    assert process_pool.run(interrupted, Mesh(dp_shard=2), 10) == [(True, 20.0)] * 2


def callback_counts(world: World, numel: int) -> list[str]:
    group, calls = world.group(["dp_shard"]), list[str]()
    work = group.all_reduce(torch.ones(numel))
    work.add_done_callback(lambda: calls.append("early"))
    work.wait()
    work.add_done_callback(lambda: calls.append("late"))
    return calls


@pytest.mark.parametrize("numel", [10, MAX_SLOT_NBYTES])
def test_a_callback_runs_once_when_a_result_has_come(process_pool: ProcessPool, numel: int) -> None:
    assert process_pool.run(callback_counts, Mesh(dp_shard=3), numel) == [["early", "late"]] * 3


def overwritten(world: World) -> list[bool]:
    """Returns what backward says when a tensor that it needs was summed over, in place."""
    said, group = [], world.group(["dp_shard"])
    for numel in (3, MAX_SLOT_NBYTES):
        weight = torch.ones(numel, requires_grad=True)
        saved = weight * 2
        loss = (saved * saved).sum()
        group.all_reduce(saved.detach()).wait()
        try:
            loss.backward()
        except RuntimeError as error:
            said.append(str(error))
    with torch.inference_mode():
        group.all_reduce(torch.ones(3)).wait()
    return ["modified by an inplace operation" in each for each in said]


def test_autograd_notices_an_in_place_sum_into_a_saved_tensor(process_pool: ProcessPool) -> None:
    assert process_pool.run(overwritten, Mesh(dp_shard=2)) == [[True, True]] * 2


def leftovers(world: World) -> tuple[int, int]:
    """Returns how many memory maps and descriptors this process has before it uses any of this world."""
    gc.collect()  # what failed in an earlier test may be held by its own traceback until then
    maps = sum("memfd:meshwright " in line for line in Path("/proc/self/maps").read_text().splitlines())
    fds = len(os.listdir("/proc/self/fd"))
    for axes in (["dp_shard"], ["tp"], ["dp_shard", "tp"]):
        group = world.group(axes)
        group.all_reduce(torch.ones(MAX_SLOT_NBYTES)).wait()
        group.all_reduce(torch.ones(1)).wait()
    return maps, fds


def test_twenty_worlds_in_a_row_leave_no_memory_and_no_descriptor(process_pool: ProcessPool) -> None:
    found = [process_pool.run(leftovers, Mesh(dp_shard=2, tp=2)) for _ in range(20)]
    assert all(maps == 0 for run in found for maps, _ in run)
    # a leak of one per world would be 18; torch opens and closes a few of its own in between
    assert max(fds for _, fds in found[-1]) <= max(fds for _, fds in found[1]) + 9


def without_spin(world: World) -> dict[str, str]:
    with patch("meshwright.comm.shared_memory.handshake.SPIN_NS", 0):
        return all_collectives(world, (7, MAX_SLOT_NBYTES), torch.float32)


def test_waits_that_only_sleep_are_right_too(process_pool: ProcessPool) -> None:
    right = run_on_threads(
        lambda world: all_collectives(world, (7, MAX_SLOT_NBYTES), torch.float32), Mesh(dp_shard=2)
    )
    assert process_pool.run(without_spin, Mesh(dp_shard=2)) == right
