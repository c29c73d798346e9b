"""Checks between pipeline ranks: the order of messages, and deadlocks.

A backend may buffer what is sent, or have both sides meet: gloo announces, NCCL's kernels wait for each
other. So a send counts as complete only when its receive has begun:

    pp0   SEND x        F waits for SEND x         ...
    pp1   ...           B before RECV x            B needs what pp0 sends after that F: both wait for ever
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action, Program, Role
from meshwright.plan.step.simulator import qualified_name


def find_unbuffered_deadlocks(program: Program) -> Iterator[str]:
    """Yields the ranks that wait for ever if a send completes only when its receive has begun."""
    lists, partners = {role.name: role.actions for role in program.roles}, _message_partners(program)
    cursors, issued = dict.fromkeys(lists, 0), set[str]()
    moved = bool(partners)
    while moved:
        before = sum(cursors.values())
        for role, actions in lists.items():
            while cursors[role] < len(actions) and not _missing_messages(
                role, actions[cursors[role]], partners, issued
            ):
                issued.add(qualified_name(role, actions[cursors[role]].name))
                cursors[role] += 1
        moved = sum(cursors.values()) > before
    for role, actions in lists.items() if partners else ():
        if cursors[role] < len(actions):
            at = actions[cursors[role]]
            missing_messages = ", ".join(_missing_messages(role, at, partners, issued))
            yield (
                f"{role} stops at {at.name} and waits forever for {missing_messages}, whose other side "
                "does not begin"
            )


def _message_partners(program: Program) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for role in program.roles:
        for action in (action for action in role.actions if action.stream == "recv"):
            name = qualified_name(role.name, action.name)
            for wait in action.waits:
                found[wait], found[name] = name, wait
    return found


def _missing_messages(
    role: str, action: Action, partners: Mapping[str, str], issued: set[str]
) -> Sequence[str]:
    """Returns the messages that `action` waits for and of which one side has not begun."""
    waits = () if action.stream == "recv" else action.waits
    names = (qualified_name(role, wait) for wait in waits if "/" not in wait.split("(")[0])
    return [name for name in names if name in partners and not {name, partners[name]} <= issued]


def check_message_order(plan: Plan, role: Role) -> Iterator[str]:
    """Yields messages of one rank to another that are not received in the order of sending, each once."""
    received = [
        wait
        for action in role.actions
        if action.stream == "recv"
        for wait in action.waits
        if "/" in wait.split("(")[0]
    ]
    for sender in plan.program.roles:
        sent = [
            qualified_name(sender.name, action.name)
            for action in sender.actions
            if action.stream == "send"
            and action.transfer is not None
            and plan.peer_role(sender, action.transfer).name == role.name
        ]
        received_here = [wait for wait in received if wait.startswith(f"{sender.name}/")]
        if sent != received_here:
            pairs = list(zip_longest(sent, received_here, fillvalue="nothing"))
            at = next(number for number, (one, other) in enumerate(pairs) if one != other)
            yield (
                f"what {sender.name} sends {role.name} is received in another order: {pairs[at][0]} is "
                f"matched with the receive for {pairs[at][1]}"
            )
