"""The groups of ranks in which a plan's lists meet, made before the first step.

Making a group takes every rank of the job, also those that are not in it. Ranks with unlike lists come to their messages in
unlike orders, so nobody may wait for the first message to make its group: all of them go through those of all lists in one order.

Messages from one rank to another are sent and received in one order (the static check proves it), and nobody waits for a send.
That is enough where each direction is on its own, as on gloo and in memory. On NCCL what a group issues is played in that order:

    1f1b, one group     rank 0   send x0, send x1, receive dx0 ...       rank 1   receive x0, send dx0, receive x1 ...
                        x1 waits for a receive that stands behind dx0, and dx0 for one that stands behind x1

So there each ordered pair of neighbours has a group of its own (`way`), in which all messages go the same way.
"""

from collections.abc import Iterator

from meshwright.comm.collectives.group import Group, World
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import AXES
from meshwright.plan.step.single_device import role_of

GroupKey = tuple[tuple[str, ...], tuple[int, ...]]  # axes, and the indices of those among the ranks there


def create_groups(plan: Plan, world: World) -> None:
    """Have `world` make every group that any rank of `plan` needs in a step; all ranks call this, with the lists of all."""
    moves = (move for _, actions in plan.program.roles for action in actions for move in action.transfers)
    found = {
        (tuple(axis for axis in AXES if axis in move.axes), among)
        for move in moves
        for among in move.member_groups(plan.mesh)
    }
    if world.directed:
        found |= set(_ways(plan))
    for axes, among in sorted(found):
        world.group(axes, among)


def p2p_group(world: World, axes: tuple[str, ...], peer: int, *, is_sender: bool) -> tuple[Group, int]:
    """The group in which this rank sends to that at index `peer` along `axes`, or receives; its index there."""
    group = world.group(axes)
    if not world.directed:
        return group, peer
    pair = (group.index, peer) if is_sender else (peer, group.index)
    return world.group(axes, pair), int(is_sender)


def _ways(plan: Plan) -> Iterator[GroupKey]:
    """Source and target of all that a rank sends to one other alone."""
    index = {role_of({"pp": place}): place for place in range(plan.mesh.pp)}
    for role, actions in plan.program.roles:
        for action in actions:
            if action.stream == "send" and action.transfer is not None and action.transfer.peer is not None:
                yield action.transfer.axes, (index[role], action.transfer.peer)
