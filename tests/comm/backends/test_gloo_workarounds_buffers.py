"""All-gathers over gloo: as broadcasts on one host and between two, by gloo's own ring among more; a wait
that times out is repeated.
"""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from meshwright.comm.backends.async_work import _completes_within
from meshwright.comm.backends.gloo_workarounds import BroadcastWorks
from meshwright.comm.backends.process_group import TorchGroup
from meshwright.comm.collectives.group import World
from meshwright.comm.shared_memory import handshake
from meshwright.comm.world import TorchWorld
from meshwright.plan.sharding.mesh import Mesh
from meshwright.testing.ranks import ProcessPool
from tests.comm.gloo_ranks import over_gloo


class Late:
    """A work of the backend that is over at its second wait, or fails then."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits, self.calls = error, 0, []

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        return self.waits > 0

    def get_future(self) -> "Late":
        return self

    def add_done_callback(self, call: Callable[[object], None]) -> None:
        self.calls.append(call)


def test_a_work_that_ends_while_its_wait_gives_up_is_over():
    assert _completes_within(Late(), timedelta(seconds=1))


def test_its_own_error_is_what_is_raised():
    with pytest.raises(RuntimeError, match="connection reset"):
        _completes_within(Late("connection reset"), timedelta(seconds=1))


def test_several_works_are_over_with_the_last_of_them():
    works, told = [Late(), Late(), Late()], []
    handed = BroadcastWorks(works)
    handed.get_future().add_done_callback(told.append)
    for number, work in enumerate(works):
        assert not told
        for call in work.calls:
            call(number)
    assert told == [2]


def gathered(world: World, near: bool | None) -> tuple[bool, list[float], list[float]]:
    """Whether the group knows its ranks near, an all-gather, and one in place."""
    group = world.group(("dp_shard",))
    assert isinstance(group, TorchGroup)
    if near is not None:
        group.is_single_host = near
    mine = torch.arange(3.0) + 10 * world.rank
    apart, inside = torch.empty(3 * group.size), torch.zeros(group.size, 3)
    inside[group.index] = mine
    works = [group.all_gather(apart, mine), group.all_gather(inside, inside[group.index])]
    told: list[str] = []
    works[0].add_done_callback(lambda: told.append("came"))
    for work in reversed(works):
        work.wait()
    works[0].add_done_callback(lambda: told.append("is there"))
    assert "is there" in told
    return group.is_single_host, apart.tolist(), inside.view(-1).tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_broadcasts_gather_what_gloo_gathers(process_pool: ProcessPool, size: int):
    expected = [10.0 * rank + place for rank in range(size) for place in range(3)]
    for near in (None, True, False):
        found = process_pool.run(over_gloo, Mesh(dp_shard=size), gathered, near)
        assert all(apart == inside == expected for _, apart, inside in found)
    assert [known for known, _, _ in process_pool.run(over_gloo, Mesh(dp_shard=size), gathered, None)] == [
        size > 2
    ] * size


def told_apart(world: World) -> bool:
    """Whether a group of three is taken for near when its ranks are on hosts of their own."""
    before = handshake.host_id
    handshake.host_id = lambda: f"host {world.rank}"
    try:
        other = TorchWorld(world.mesh, world.rank, "cpu", shared_memory=False)
        group = other.group(("dp_shard",))
        assert isinstance(group, TorchGroup)
        group.barrier()
        other.close()
        return group.is_single_host
    finally:
        handshake.host_id = before


def test_ranks_on_several_hosts_go_round_gloos_ring(process_pool: ProcessPool):
    assert process_pool.run(told_apart, Mesh(dp_shard=3)) == [False] * 3


def halves(world: World) -> list[list[float]]:
    """Sums of a pair, which sends halves alone: into memory of its own, and in place."""
    group = world.group(("dp_shard",))
    given = torch.arange(6.0) * (world.rank + 1)
    apart, inside = torch.empty(3), given.clone()
    works = [group.reduce_scatter(apart, given), group.reduce_scatter(inside.view(2, 3)[group.index], inside)]
    for work in works:
        work.wait()
    return [apart.tolist(), inside.view(2, 3)[group.index].tolist()]


def test_a_pair_sums_halves(process_pool: ProcessPool):
    assert process_pool.run(over_gloo, Mesh(dp_shard=2), halves) == [
        [[0.0, 3.0, 6.0]] * 2,
        [[9.0, 12.0, 15.0]] * 2,
    ]
