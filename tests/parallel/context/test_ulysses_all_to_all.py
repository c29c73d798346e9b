"""The key and value heads that each rank receives, and the ranks of each group of the exchange."""

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.parallel.context.ulysses_all_to_all import KVHeadAssignment
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer, neighbour_indices
from meshwright.testing.ranks import ProcessPool


def test_heads_of_keys_go_to_all_that_need_them() -> None:
    assert KVHeadAssignment.for_heads(8, 4, 2) == KVHeadAssignment(((0, 1), (2, 3)))
    assert KVHeadAssignment.for_heads(4, 2, 4) == KVHeadAssignment(((0,), (0,), (1,), (1,)))
    assert KVHeadAssignment.for_heads(6, 3, 2) == KVHeadAssignment(((0, 1), (1, 2)), ((0, 0, 1), (0, 1, 1)))
    assert KVHeadAssignment.for_heads(6, 2, 3) == KVHeadAssignment(
        ((0, 0), (0, 1), (1, 1)), ((0, 0), (0, 1), (0, 0))
    )


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_every_head_of_queries_finds_the_one_that_it_shares(groups: int, ranks: int) -> None:
    needs, each = KVHeadAssignment.for_heads(12, groups, ranks), 12 // ranks
    for rank in range(ranks):
        uses = (
            needs.used_heads[rank]
            if needs.used_heads
            else [head * needs.num_sent // each for head in range(each)]
        )
        assert [needs.sent_heads[rank][at] for at in uses] == [
            (rank * each + head) * groups // 12 for head in range(each)
        ]


def test_neighbours_meet_in_groups_of_one_size() -> None:
    assert [neighbour_indices(index, 3) for index in (0, 2, 4)] == [(0, 1, 2), (0, 1, 2), (3, 4, 5)]
    assert neighbour_indices(4, 0) == ()
    mesh, move = Mesh(cp=6), Transfer("all_to_all", ("cp",), 8, num_neighbours=3)
    assert move.num_ranks(mesh) == 3
    assert move.member_groups(mesh) == ((0, 1, 2), (3, 4, 5))
    assert Transfer("all_to_all", ("cp",), 8).member_groups(mesh) == ((),)


def swapped(world: World) -> list[float]:
    """Returns what arrives from each of two neighbours; groups are made in one order by all."""
    torch.set_num_threads(1)
    groups = [
        world.group(("cp",), among)
        for among in Transfer("all_to_all", ("cp",), 8, num_neighbours=2).member_groups(world.mesh)
    ]
    group, arrived = groups[world.rank // 2], torch.empty(2)
    group.all_to_all(arrived, torch.full((2,), float(world.rank))).wait()
    return arrived.tolist()


def test_neighbours_meet_in_processes_too(process_pool: ProcessPool) -> None:
    assert process_pool.run(swapped, Mesh(cp=4)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
