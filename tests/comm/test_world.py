"""Ranks as processes: joining, leaving, and errors of both. Collectives are in test_group.py."""

import socket
from datetime import timedelta
from pathlib import Path
from threading import Event
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.collectives.group import World
from meshwright.comm.rendezvous import RendezvousEndpoint
from meshwright.comm.world import BACKEND_TIMEOUT_MARGIN_S, TorchWorld, init_world
from meshwright.plan.job.errors import CollectiveError, PlanError
from meshwright.plan.job.timeouts import WaitLimits
from meshwright.plan.sharding.mesh import AXES, Mesh
from meshwright.testing.ranks import ProcessPool, RankFailure


def test_a_rank_alone_joins_and_leaves_no_process_group(tmp_path: Path) -> None:
    with init_world(Mesh(), 0, store_path=tmp_path / "store") as world:
        tensor = torch.ones(3)
        world.group(["dp_shard"]).all_reduce(tensor).wait()
        assert torch.equal(tensor, torch.ones(3))
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_a_rank_meets_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with init_world(Mesh(), 0, endpoint=RendezvousEndpoint("127.0.0.1", port, is_single_host=True)) as world:
        assert world.rank == 0
    assert not dist.is_initialized()


def test_no_process_group_is_left_when_the_body_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), init_world(Mesh(), 0, store_path=tmp_path / "store"):
        raise KeyError("in the body")
    assert not dist.is_initialized()


def test_exactly_one_way_to_meet_is_needed() -> None:
    with pytest.raises(ValueError, match=r"neither given; one is needed\. Pass a file"):
        init_world(Mesh(), 0).__enter__()
    with pytest.raises(ValueError, match="both given"):
        init_world(Mesh(), 0, store_path="store", endpoint=RendezvousEndpoint("127.0.0.1", 1)).__enter__()


def test_a_rank_that_finds_no_peers_raises(tmp_path: Path) -> None:
    with pytest.raises(
        CollectiveError,
        match=r"rank 0 did not complete the rendezvous with the other 1 ranks within 0\.5 s.*Look for a rank",
    ):
        init_world(Mesh(tp=2), 0, store_path=tmp_path / "store", timeout_s=0.5).__enter__()


def test_a_world_of_another_size_is_refused(tmp_path: Path) -> None:
    with (
        init_world(Mesh(), 0, store_path=tmp_path / "store"),
        pytest.raises(
            PlanError,
            match=r"(?s)this process is rank 0 of 1; the plan has it as rank 1 of 4.*start 4 processes",
        ),
    ):
        TorchWorld(Mesh(tp=4), 1, "cpu")


def leave_rank_one_waiting(world: World) -> None:
    group = world.group(["dp_shard"])
    group.barrier()  # before it, rank 1 may still be joining
    if world.rank == 1:
        group.all_reduce(torch.zeros(3), action="REDUCE(a)").wait()
    else:
        raise InterruptedError("gone")


def test_a_collective_whose_peer_is_gone_names_rank_action_and_repair(process_pool: ProcessPool) -> None:
    text = r"(?s)InterruptedError: gone\nthen rank 1: .*rank 1: all_reduce of float32 \[3\] for REDUCE\(a\) "
    text += r"over dp_shard \(ranks 0, 1\) did not complete"
    with pytest.raises(RankFailure, match=text):
        process_pool.run(leave_rank_one_waiting, Mesh(dp_shard=2))


def closed_twice(world: World) -> bool:
    world.group(["tp"]).barrier()
    world.close()
    world.close()
    return dist.is_initialized()


def test_closing_twice_does_nothing_more(process_pool: ProcessPool) -> None:
    assert process_pool.run(closed_twice, Mesh(dp_shard=2, tp=2)) == [True] * 4


def destroyed_early(world: World) -> list[str]:
    """What a world says whose program destroys its process groups; that of the pool needs none."""
    world.group(AXES).barrier()
    mine, said = TorchWorld(world.mesh, world.rank, "cpu", shared_memory=False), list[str]()
    group = mine.group(AXES)
    group.barrier()
    dist.destroy_process_group()
    for ask in (
        lambda: group.all_reduce(torch.ones(3)),
        lambda: group.all_reduce(torch.ones(3), algorithm="ring"),
        lambda: mine.group(["dp_shard"]),
    ):
        with pytest.raises(PlanError) as refused:
            ask()
        said.append(str(refused.value))
    mine.close()
    return said


def test_process_groups_that_are_destroyed_before_the_last_message_are_named(
    process_pool: ProcessPool,
) -> None:
    for said in process_pool.run(destroyed_early, Mesh(dp_shard=2)):
        for text in said:
            assert "destroy_process_group() was called, and ranks still have messages to send" in text
            assert "behind trainer.close()" in text


def whole_mesh(world: World) -> bool:
    world.group(["dp_shard", "tp"]).barrier()
    return len(dist.distributed_c10d._world.pg_map) == 1


def test_the_whole_mesh_uses_the_default_group(process_pool: ProcessPool) -> None:
    assert process_pool.run(whole_mesh, Mesh(dp_shard=2, tp=2)) == [True] * 4


def callbacks_ran(world: World) -> tuple[bool, bool]:
    """Whether `then` calls after the result has come, for a collective under way and for one that was waited
    for.
    """
    group, arrived, late = world.group(["dp_shard"]), Event(), Event()
    work = group.all_reduce(torch.ones(1000))
    work.add_done_callback(arrived.set)
    work.wait()
    came = arrived.wait(30)
    work.add_done_callback(late.set)
    return came, late.is_set()


def test_a_callback_runs_when_a_result_has_come(process_pool: ProcessPool) -> None:
    assert process_pool.run(callbacks_ran, Mesh(dp_shard=3)) == [(True, True)] * 3


def timeout_of_a_part(world: World) -> list[float]:
    made: list[float] = []
    new_group = dist.new_group

    def noting(ranks: list[int], timeout: timedelta) -> object:
        made.append(timeout.total_seconds())
        return new_group(ranks, timeout)

    limits = WaitLimits(save_s=3600.0)
    own = TorchWorld(world.mesh, world.rank, world.device, limits=limits, shared_memory=False)
    with patch.object(dist, "new_group", noting):
        own.group(["dp_shard"])
    dist.barrier()  # a rank that closes its connections would fail one that still connects
    own.close()
    return made


def test_a_backend_is_more_patient_than_the_longest_limit(process_pool: ProcessPool) -> None:
    expected = [3600.0 + BACKEND_TIMEOUT_MARGIN_S] * 2  # of the groups of all ranks
    assert process_pool.run(timeout_of_a_part, Mesh(dp_shard=2, tp=2)) == [expected] * 4


def split_world(world: World) -> tuple[list[list[list[int]]], int, list[str], list[float]]:
    """As on NCCL, with a split by new groups of gloo."""
    splits: list[list[list[int]]] = []
    sent: list[str] = []

    def split_group(*, split_ranks: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
        splits.append(split_ranks)
        made = [dist.new_group(ranks, timeout) for ranks in split_ranks]
        return next((each for each in made if isinstance(each, dist.ProcessGroup)), None)

    apart = TorchWorld(world.mesh, world.rank, "cpu", shared_memory=False)
    apart.serializes_p2p = True
    send, recv = dist.send, dist.recv
    with (
        patch("meshwright.comm.world.can_split", return_value=True),
        patch.object(dist, "split_group", split_group),
        patch.object(dist, "send", lambda *args: sent.append(f"to {args[1]}") or send(*args)),
        patch.object(dist, "recv", lambda *args: sent.append(f"from {args[1]}") or recv(*args)),
    ):
        pairs = [(("pp",), pair) for pair in ((0, 1), (1, 0))]
        keys = {
            (("pp",), ()),
            (("dp_shard",), ()),
            (("dp_shard", "cp"), ()),
            (("pp", "dp_shard"), ()),
            *pairs,
        }
        apart.create_groups(keys)
        apart.create_groups(keys)
    sums = []
    for axes, _ in sorted(keys - set(pairs)):
        tensor = torch.full((2,), float(world.rank + 1))
        apart.group(axes).all_reduce(tensor).wait()
        sums.append(float(tensor[0]))
    num_groups = sum(each is not None for each in apart._process_groups.values())
    apart.group(["pp", "dp_shard"]).barrier()
    apart.close()
    return splits, num_groups, sent, sums


def test_groups_of_a_plan_are_few_splits_and_connected_pairs(process_pool: ProcessPool) -> None:
    ranks = process_pool.run(split_world, Mesh(pp=2, dp_shard=2))
    for splits, num_groups, _, _ in ranks:
        # the group of all ranks is there; dp_shard with an axis of one rank is dp_shard
        assert splits == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]], [[0, 2], [1, 3]]]
        assert num_groups == 4
    assert [sent for *_, sent, _ in ranks] == [
        2 * each for each in (["to 2", "from 2"], ["to 3", "from 3"], ["from 0", "to 0"], ["from 1", "to 1"])
    ]
    # keys in order: dp_shard, dp_shard x cp, pp, all
    assert [sums for *_, sums in ranks] == [[3, 3, 4, 10], [3, 3, 6, 10], [7, 7, 4, 10], [7, 7, 6, 10]]
