"""The process groups of a plan, made before the first step.

Every rank of the job takes part in making a group, also ranks that are not in it. Ranks with different action
lists reach their messages in different orders, so no group may be made at its first message: all ranks make
the groups of all lists in one order.

Messages from one rank to another are sent and received in one order (the static checks prove it), and no rank
waits for a send. That is enough where each direction is independent, as on gloo and in memory. On NCCL a
group runs in the order in which its operations are issued:

    1f1b, one group     rank 0   send x0, send x1, recv dx0 ...       rank 1   recv x0, send dx0, recv x1 ...
                        x1 waits for a receive that comes after dx0, and dx0 for one that comes after x1

So on NCCL each ordered pair of neighbours has a group of its own (`p2p_group`), in which all messages go the
same way.
"""

from collections.abc import Iterator

from meshwright.comm.collectives.group import Group, GroupKey, World
from meshwright.plan.plan import Plan
from meshwright.plan.sharding.mesh import in_mesh_order
from meshwright.plan.step.program import Transfer


def create_groups(plan: Plan, world: World) -> None:
    """Makes `world` create every group that any rank of `plan` needs in a step; all ranks call it."""
    world.create_groups(group_keys(plan, serializes_p2p=world.serializes_p2p))


def group_keys(plan: Plan, *, serializes_p2p: bool) -> set[GroupKey]:
    """Returns every group that any rank of `plan` needs in a step (see `World` for `serializes_p2p`)."""
    moves = (move for role in plan.program.roles for action in role.actions for move in action.transfers)
    keys: set[GroupKey] = {
        (in_mesh_order(message.axes), among)
        for move in moves
        for message in _grouped(move)
        for among in message.member_groups(plan.mesh)
    }
    if plan.sharding.params_on_servers:  # these gather whole tables from one another
        keys.add(((plan.sharding.server_axis,), tuple(plan.sharding.server_indices)))
    return keys | set(_p2p_pairs(plan)) if serializes_p2p else keys


def _grouped(move: Transfer) -> tuple[Transfer, ...]:
    """Returns the messages of `move` that need groups of their own; those among some of its ranks are rounds
    of one exchange in the group of all.
    """
    return (move,) if any(message.stride > 1 for message in move.messages) else move.messages


def p2p_group(world: World, axes: tuple[str, ...], peer: int, *, is_sender: bool) -> tuple[Group, int]:
    """Returns the group in which this rank sends to (or receives from) `peer`, and the peer's index in it."""
    group = world.group(axes)
    if not world.serializes_p2p:
        return group, peer
    pair = (group.index, peer) if is_sender else (peer, group.index)
    return world.group(axes, pair), int(is_sender)


def _p2p_pairs(plan: Plan) -> Iterator[GroupKey]:
    for role in plan.program.roles:
        for action in role.actions:
            if action.stream == "send" and action.transfer is not None and action.transfer.peer is not None:
                sender = plan.mesh.index(plan.mesh.coordinate(role.ranks[0]), action.transfer.axes)
                yield action.transfer.axes, (sender, action.transfer.peer)
