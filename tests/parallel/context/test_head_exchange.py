"""Which heads of keys and values go where, and which ranks meet for it."""

import pytest
import torch

from meshwright.comm.collectives.group import World
from meshwright.parallel.context.head_exchange import Needs
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.action import Transfer, neighbours
from meshwright.testing.ranks import ProcessPool


def test_heads_of_keys_go_to_all_that_need_them() -> None:
    assert Needs.of(8, 4, 2) == Needs(((0, 1), (2, 3)))
    assert Needs.of(4, 2, 4) == Needs(((0,), (0,), (1,), (1,)))
    assert Needs.of(6, 3, 2) == Needs(((0, 1), (1, 2)), ((0, 0, 1), (0, 1, 1)))
    assert Needs.of(6, 2, 3) == Needs(((0, 0), (0, 1), (1, 1)), ((0, 0), (0, 1), (0, 0)))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_every_head_of_queries_finds_the_one_that_it_shares(groups: int, ranks: int) -> None:
    needs, each = Needs.of(12, groups, ranks), 12 // ranks
    for rank in range(ranks):
        uses = needs.uses[rank] if needs.uses else [head * needs.most // each for head in range(each)]
        assert [needs.sent[rank][at] for at in uses] == [(rank * each + head) * groups // 12 for head in range(each)]


def test_neighbours_meet_in_groups_of_one_size() -> None:
    assert [neighbours(index, 3) for index in (0, 2, 4)] == [(0, 1, 2), (0, 1, 2), (3, 4, 5)]
    assert neighbours(4, 0) == ()
    mesh, move = Mesh(cp=6), Transfer("all_to_all", ("cp",), 8, near=3)
    assert move.ranks(mesh) == 3
    assert move.parties(mesh) == ((0, 1, 2), (3, 4, 5))
    assert Transfer("all_to_all", ("cp",), 8).parties(mesh) == ((),)


def swapped(world: World) -> list[float]:
    """What arrives from each of two neighbours; groups are made in one order by all."""
    torch.set_num_threads(1)
    groups = [world.group(("cp",), among) for among in Transfer("all_to_all", ("cp",), 8, near=2).parties(world.mesh)]
    group, arrived = groups[world.rank // 2], torch.empty(2)
    group.all_to_all(arrived, torch.full((2,), float(world.rank))).wait()
    return arrived.tolist()


def test_neighbours_meet_in_processes_too(process_pool: ProcessPool) -> None:
    assert process_pool.run(swapped, Mesh(cp=4)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
