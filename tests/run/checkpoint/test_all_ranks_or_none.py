"""Operations of all ranks together: a failure on one rank is an error on all, with its reason, and no rank
hangs.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.run.checkpoint.distributed_checkpoint import save_tensors
from meshwright.run.checkpoint.manifest import CheckpointError, ShardFile
from meshwright.run.checkpoint.shard_io import write_shard
from meshwright.testing.ranks import run_on_threads
from tests.run.checkpoint.awkward_states import (
    META,
    THREE,
    assert_holds,
    attempt,
    names,
    partial,
    saved,
    state,
)
from tests.run.checkpoint.failing_disk import WRITES, Machine


def test_ranks_with_different_states_are_named(tmp_path):
    def body(world: World) -> str:
        tensors = {"model/w": torch.zeros(3 if world.rank == 1 else 2)}
        with pytest.raises(CheckpointError) as caught:
            save_tensors(tmp_path, 1, tensors, {}, world.group(("dp_shard",)), 1)
        return str(caught.value)

    for message in run_on_threads(body, THREE):
        assert "the list of tensors differs on ranks [1] from rank 0" in message
        assert "hold the same tensors on every rank" in message
    assert names(tmp_path) == []


def test_every_vote_is_an_entry_of_the_ledger(tmp_path):
    def body(world: World) -> set[str]:
        world.ledger.is_recording = True
        save_tensors(tmp_path, 1, state(), META, world.group(("dp_shard",)), 1)
        return {f"{entry.action} {entry.collective}" for entry in world.ledger.entries}

    assert run_on_threads(body, THREE) == [{"SAVE all_gather"}] * 3


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_disk_that_is_full_under_one_rank_is_an_error_on_all(culprit: int, tmp_path, monkeypatch):
    machine = Machine(monkeypatch, WRITES)
    at, reached = 0, True
    while reached:
        folder = tmp_path / str(at)
        saved(folder, 1)

        def body(world: World, folder: Path = folder, at: int = at) -> CheckpointError | None:
            if world.rank == culprit:
                machine.arm(at, "full")
            return attempt(folder, 2, world.group(("dp_shard",)))

        errors = run_on_threads(body, THREE)
        reached = machine.disarm()
        if reached:
            for rank, error in enumerate(errors):
                assert f"failed on rank {culprit} (No space left on device)" in str(error), at
                assert isinstance(error.__cause__, OSError) == (rank == culprit)
        else:
            assert errors == [None] * 3
        assert partial(folder) == []
        assert_holds(folder / "step-00000001", state(1))
        at += 1
    assert at > (10 if culprit == 0 else 5)


def test_an_error_that_is_no_os_error_reaches_all_ranks_too(tmp_path, monkeypatch):
    def broken(path: Path, tensors: Mapping[str, torch.Tensor]) -> ShardFile:
        if path.name == "rank-00001.safetensors":
            raise RuntimeError("the device is gone")
        return write_shard(path, tensors)

    def body(world: World) -> str:
        with pytest.raises(CheckpointError) as caught:
            save_tensors(tmp_path, 2, state(2), META, world.group(("dp_shard",)), keep=2)
        return str(caught.value)

    monkeypatch.setattr("meshwright.run.checkpoint.distributed_checkpoint.write_shard", broken)
    first, second, third = run_on_threads(body, THREE)
    assert "writing failed on rank 1 (its own message says why): the device is gone" in second
    assert first == third
    assert "writing failed on rank 1 (its own message says why)\n" in first
    assert names(tmp_path) == []
