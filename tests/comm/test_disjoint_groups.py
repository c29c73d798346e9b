"""All groups of a plan in few splits of a communicator."""

from meshwright.comm.collectives.group import GroupKey
from meshwright.comm.disjoint_groups import communicator_splits, groups_of
from meshwright.plan.sharding.mesh import Mesh

PP4_DP2 = Mesh(pp=4, dp_replicate=2)


def neighbours(stages: int) -> list[GroupKey]:
    pairs = [(first, first + 1) for first in range(stages - 1)]
    return [(("pp",), pair) for first, second in pairs for pair in ((first, second), (second, first))]


def test_groups_of_a_key_lie_at_every_position_along_the_other_axes() -> None:
    assert groups_of(PP4_DP2, (("dp_replicate",), ())) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_of(PP4_DP2, (("pp",), (2, 1))) == [(4, 2), (5, 3)]


def test_pairs_of_neighbours_take_four_splits_and_axes_one() -> None:
    mesh = Mesh(pp=16, dp_shard=64)
    keys = [(("dp_shard",), ()), (("pp",), ()), *neighbours(16)]
    assert sum(len(groups_of(mesh, key)) for key in neighbours(16)) == 1920
    batches = communicator_splits(mesh, keys)
    assert len(batches) == 6
    for batch in batches:
        ranks = [rank for groups in batch.values() for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
    assert {key for batch in batches for key in batch} == set(keys)


def test_a_ring_of_three_stages_takes_a_split_per_direction_and_pair() -> None:
    ring: list[GroupKey] = [(("pp",), pair) for pair in ((0, 1), (1, 2), (2, 0))]
    assert len(communicator_splits(Mesh(pp=3), ring)) == 3


def test_groups_of_all_ranks_of_one_rank_and_of_the_same_ranks_take_no_split_of_their_own() -> None:
    mesh = Mesh(pp=2, dp_shard=2)
    keys: list[GroupKey] = [
        (("pp", "dp_shard"), ()),
        (("tp",), ()),
        (("dp_shard", "cp"), ()),
        (("dp_shard",), ()),
    ]
    assert communicator_splits(mesh, keys) == [{(("dp_shard",), ()): [(0, 1), (2, 3)]}]
    # a pair of all ranks still needs a communicator of its own, for one direction
    assert len(communicator_splits(Mesh(pp=2), [(("pp",), (0, 1)), (("pp",), (1, 0))])) == 2
