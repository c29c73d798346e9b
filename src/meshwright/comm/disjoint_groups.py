"""Packs groups of ranks into batches without a common rank, each of which is one split of a communicator.

NCCL makes groups by splitting the communicator of all ranks. A split is collective over the whole job, and
one split can make any number of groups, as long as no rank is in two of them.

    mesh pp 4, dp 2       groups over dp            (0 1) (2 3) (4 5) (6 7)       one split
                          stage 0 -> 1, 2 -> 3      (0 2) (1 3) (4 6) (5 7)       one split
                          stage 1 -> 2              (2 4) (3 5)                   one split

One group per call would be 12 calls on 8 ranks, and 1,920 on 1,024 ranks with 16 stages. Here all pairs of
neighbouring stages, in both directions, take four splits, and each set of axes takes one.
"""

from collections.abc import Iterable

from meshwright.comm.collectives.group import GroupKey
from meshwright.plan.sharding.mesh import Mesh

Batch = dict[GroupKey, list[tuple[int, ...]]]  # the ranks of every group of each key


def communicator_splits(mesh: Mesh, keys: Iterable[GroupKey]) -> list[Batch]:
    """Returns the splits that make the groups of `keys`, in order; every rank takes part in each.

    A group of one rank, and that of all ranks, needs none.
    """
    used = dict.fromkeys(used_axes(mesh, key) for key in keys)
    return _pack_disjoint(mesh, (key for key in used if needs_communicator(mesh, key)))


def used_axes(mesh: Mesh, key: GroupKey) -> GroupKey:
    """Returns `key` without axes of size 1: what tells groups apart on every rank alike."""
    axes, member_indices = key
    return tuple(axis for axis in axes if mesh.size(axis) > 1), member_indices


def needs_communicator(mesh: Mesh, key: GroupKey) -> bool:
    """Returns whether the groups of `key` have more than one rank and fewer than all, or are pairs of all."""
    axes, member_indices = key
    size = len(member_indices) or mesh.group_size(axes)
    return size > 1 and (bool(member_indices) or size < mesh.world_size)


def groups_of(mesh: Mesh, key: GroupKey) -> list[tuple[int, ...]]:
    """Returns the ranks of all groups of `key`: one group for every position along the other axes."""
    axes, member_indices = key
    return [tuple(ranks[index] for index in member_indices) or ranks for ranks in mesh.groups(axes)]


def _pack_disjoint(mesh: Mesh, keys: Iterable[GroupKey]) -> list[Batch]:
    """Returns batches of all groups of `keys`, in order; no rank is in two groups of a batch."""
    batches: list[Batch] = []
    occupied: list[set[int]] = []
    for key in keys:
        groups = groups_of(mesh, key)
        ranks = {rank for group in groups for rank in group}
        index = next((i for i, others in enumerate(occupied) if others.isdisjoint(ranks)), len(batches))
        if index == len(batches):
            batches.append({})
            occupied.append(set())
        batches[index][key] = groups
        occupied[index] |= ranks
    return batches
