"""Groups of some ranks along an axis: members communicate, the others form groups of one."""

import torch

from meshwright.comm.backends.fake import FakeWorld
from meshwright.comm.collectives.flight_recorder import IssuedCollective
from meshwright.comm.collectives.group import World
from meshwright.plan.sharding.mesh import Mesh
from meshwright.plan.step.program import Transfer
from meshwright.testing.ranks import ProcessPool, run_on_threads

GRID, AMONG = Mesh(pp=3, tp=2), ((0, 2), (1, 2), ())
Told = list[tuple[float, int, tuple[int, ...]]]


def summed(world: World) -> Told:
    """Per group: the sum of the ranks' numbers there, its size and its ranks.

    All ranks ask for all groups.
    """
    told = []
    for among in AMONG:
        group, mine = world.group(("pp",), among), torch.tensor([float(10**world.rank)])
        group.all_reduce(mine, action="TEST").wait()
        told.append((mine.item(), group.size, group.ranks))
    return told


def right(mesh: Mesh, found: list[Told]) -> None:
    for rank in range(mesh.world_size):
        peers, index = mesh.peers(rank, ("pp",)), mesh.coordinate(rank)["pp"]
        for told, among in zip(found[rank], AMONG, strict=True):
            ranks = (
                tuple(peers[each] for each in among or range(mesh.pp))
                if not among or index in among
                else (rank,)
            )
            assert told == (sum(10.0**peer for peer in ranks), len(ranks), ranks)


def test_some_ranks_along_an_axis_meet_on_threads():
    right(GRID, run_on_threads(summed, GRID))


def test_some_ranks_along_an_axis_meet_on_processes(process_pool: ProcessPool):
    right(Mesh(pp=3), process_pool.run(summed, Mesh(pp=3)))


def test_a_fake_group_has_the_right_size():
    sizes = [[FakeWorld(GRID, rank).group(("pp",), among).size for among in AMONG] for rank in (0, 2, 4)]
    assert sizes == [[2, 1, 3], [1, 2, 3], [2, 2, 3]]


def test_what_some_ranks_issue_is_numbered_apart_from_what_all_do():
    world = FakeWorld(GRID, 4)
    for among in (*AMONG, *AMONG):
        world.group(("pp",), among).all_reduce(torch.zeros(3), action="TEST")
    issued: list[IssuedCollective] = world.ledger.flight_recorder.entries()
    assert [(each.channel, each.number) for each in issued] == [
        *((("pp", 0, 2), 1), (("pp", 1, 2), 1), (("pp",), 1)),
        *((("pp", 0, 2), 2), (("pp", 1, 2), 2), (("pp",), 2)),
    ]


def test_a_transfer_counts_those_that_take_part():
    assert Transfer("all_reduce", ("pp",), 8, member_indices=(0, 2)).num_ranks(GRID) == 2
    assert Transfer("all_reduce", ("pp", "tp"), 8).num_ranks(GRID) == 6
