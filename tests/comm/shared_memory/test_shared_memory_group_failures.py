"""Errors of shared-memory ranks when one of them is gone, or calls something else."""

import os
import signal
from pathlib import Path

import pytest
import torch

from meshwright.comm.collectives.group import Group, World
from meshwright.comm.shared_memory.shared_memory_group import MAX_SLOT_NBYTES, SharedMemoryGroup
from meshwright.plan.job.errors import CollectiveError
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure

MESH = Mesh(dp_shard=3)


def writing_down(folder: Path, world: World, group: Group, call: str, tensor: torch.Tensor) -> None:
    """Issue `call` and wait; leave the words of what is raised in `folder`."""
    try:
        if call == "all_reduce":
            group.all_reduce(tensor, action="REDUCE(a)").wait()
        else:
            group.all_gather(tensor.new_empty(group.size * tensor.numel()), tensor, action="GATHER(a)").wait()
    except CollectiveError as error:
        (folder / f"{world.rank}").write_text(str(error))
        raise


def die_in_a_wait(world: World, folder: Path, numel: int) -> None:
    group = world.group(["dp_shard"])
    group.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    writing_down(folder, world, group, "all_reduce", torch.ones(numel))


@pytest.mark.parametrize("numel", [10, MAX_SLOT_NBYTES])
def test_a_wait_for_a_killed_rank_names_it(tmp_path: Path, numel: int) -> None:
    names = set(os.listdir("/dev/shm"))
    with ProcessPool() as pool, pytest.raises(RankFailure, match="rank 1 of 3"):
        pool.run(die_in_a_wait, MESH, tmp_path, numel)
    for rank in (0, 2):
        text = (tmp_path / f"{rank}").read_text()
        assert (
            f"rank {rank}: all_reduce of float32 [{numel}] for REDUCE(a) over dp_shard (ranks 0, 1, 2) did "
            f"not complete"
        ) in text
        assert "rank 1 is gone: its process has ended" in text
    assert set(os.listdir("/dev/shm")) <= names


def die_in_the_middle(world: World, folder: Path) -> None:
    """Rank 1 dies after it has come to a long operation, with the others somewhere in it."""
    group = world.group(["dp_shard"])
    tensor = torch.ones(1 << 24)
    group.barrier()
    if world.rank == 1:
        group.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL)
    writing_down(folder, world, group, "all_reduce", tensor)


def test_a_rank_killed_in_the_middle_of_a_long_operation_is_named(tmp_path: Path) -> None:
    with ProcessPool() as pool, pytest.raises(RankFailure, match="rank 1 of 3"):
        pool.run(die_in_the_middle, MESH, tmp_path)
    assert "rank 1 is gone: its process has ended" in (tmp_path / "0").read_text()


def leave_early(world: World, folder: Path) -> None:
    group = world.group(["dp_shard"])
    group.barrier()
    if world.rank == 1:
        raise InterruptedError("on purpose")
    writing_down(folder, world, group, "all_reduce", torch.ones(4))


def test_a_wait_for_a_failed_rank_raises(process_pool: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="InterruptedError: on purpose"):
        process_pool.run(leave_early, MESH, tmp_path)
    assert "REDUCE(a)" in (tmp_path / "0").read_text()
    assert "REDUCE(a)" in (tmp_path / "2").read_text()


def disagree(world: World, folder: Path, call: str, numel: int) -> None:
    group = world.group(["dp_shard"])
    mine = ("all_reduce", 10) if world.rank != 1 else (call, numel)
    writing_down(folder, world, group, mine[0], torch.ones(mine[1]))


@pytest.mark.parametrize(
    ("call", "numel"), [("all_gather", 10), ("all_reduce", 11), ("all_reduce", MAX_SLOT_NBYTES)]
)
def test_ranks_that_call_different_things_are_all_told_both(
    process_pool: ProcessPool, tmp_path: Path, call: str, numel: int
) -> None:
    with pytest.raises(RankFailure):
        process_pool.run(disagree, MESH, tmp_path, call, numel)
    texts = [(tmp_path / f"{rank}").read_text() for rank in range(3)]
    assert any(f"rank 1: {call} of {4 * numel} bytes of float32" in text for text in texts)
    for text in texts:
        assert call in text
        assert "all_reduce" in text


def use_after_failure(world: World) -> list[str]:
    group, said = world.group(["dp_shard"]), []
    assert isinstance(group, SharedMemoryGroup)
    group.close()
    for numel in (1, MAX_SLOT_NBYTES):
        try:
            group.all_reduce(torch.ones(numel), action="LATE").wait()
        except CollectiveError as error:
            said.append(f"{error}: {error.__cause__}")
    os._exit(3) if len(said) != 2 else None
    raise InterruptedError(" | ".join(said))


def test_a_group_that_was_closed_refuses_with_the_reason(process_pool: ProcessPool) -> None:
    with pytest.raises(
        RankFailure,
        match=r"all_reduce of float32 \[1\] for LATE.* is refused.*before this collective had completed",
    ):
        process_pool.run(use_after_failure, Mesh(dp_shard=2))
