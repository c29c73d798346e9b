"""Whether messages between ranks meet when nothing is buffered: a send ends when its receive has begun, and not before.

    stage0   SEND x        F waits for SEND x         ...
    stage1   ...           B before RECEIVE x         B needs what stage0 sends after that F: nobody goes on

A backend may keep what is sent in memory of its own, or have both sides meet: gloo announces, NCCL's kernels wait for each other.
A list that holds under the second holds under both. Messages are issued without waiting; only who waits for one stands still.
"""

from collections.abc import Iterator, Mapping, Sequence

from meshwright.core.clock import full_name
from meshwright.core.program import Action, Program


def meeting_faults(program: Program) -> Iterator[str]:
    """Who waits for ever for a message where a send ends only when its receive has begun; nothing where nobody does."""
    lists, partner = dict(program.roles), _partners(program)
    cursors, issued = dict.fromkeys(lists, 0), set[str]()
    moved = bool(partner)
    while moved:
        before = sum(cursors.values())
        for role, actions in lists.items():
            while cursors[role] < len(actions) and not _missing(role, actions[cursors[role]], partner, issued):
                issued.add(full_name(role, actions[cursors[role]].name))
                cursors[role] += 1
        moved = sum(cursors.values()) > before
    for role, actions in lists.items() if partner else ():
        if cursors[role] < len(actions):
            at = actions[cursors[role]]
            lost = ", ".join(_missing(role, at, partner, issued))
            yield f"{role} stands at {at.name} and waits for ever for {lost}, whose other side does not begin"


def _partners(program: Program) -> Mapping[str, str]:
    """The receive of each send, and the send of each receive, by full names."""
    found: dict[str, str] = {}
    for role, actions in program.roles:
        for action in (action for action in actions if action.lane == "receive"):
            for wait in action.waits:
                found[wait], found[full_name(role, action.name)] = full_name(role, action.name), wait
    return found


def _missing(role: str, action: Action, partner: Mapping[str, str], issued: set[str]) -> Sequence[str]:
    """The messages that `action` waits for of which a side has not begun; issuing one waits for no other rank."""
    waits = () if action.lane == "receive" else action.waits
    names = (full_name(role, wait) for wait in waits if "/" not in wait.split("(")[0])
    return [name for name in names if name in partner and not {name, partner[name]} <= issued]
