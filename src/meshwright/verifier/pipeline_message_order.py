"""Checks between pipeline ranks: the order of messages, and deadlocks.

A backend may buffer what is sent, or have both sides meet: gloo announces, NCCL's kernels wait for each
other. So a send counts as complete only when its receive has begun:

    pp0   SEND x        F waits for SEND x         ...
    pp1   ...           B before RECV x            B needs what pp0 sends after that F: both wait for ever
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest

from meshwright.plan.event_loop import EventLoop
from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Action, Program, Role
from meshwright.plan.step.simulator import qualified_name


def find_unbuffered_deadlocks(program: Program) -> Iterator[str]:
    """Yields the ranks that wait for ever if a send completes only when its receive has begun."""
    partners = _message_partners(program)
    loop = EventLoop[str](len(program.roles) if partners else 0)
    cursors = [0] * len(program.roles)

    def begin_actions(number: int, _: float) -> None:
        role = program.roles[number]
        for action in islice(role.actions, cursors[number], None):
            messages = _awaited_messages(role.name, action, partners)
            if loop.arrival((side for each in messages for side in (each, partners[each])), number) is None:
                return
            loop.happen(qualified_name(role.name, action.name), 0.0, number)
            cursors[number] += 1

    loop.run(begin_actions)
    for role, cursor in zip(program.roles, cursors, strict=True) if partners else ():
        if cursor < len(role.actions):
            at = role.actions[cursor]
            missing_messages = ", ".join(
                name
                for name in _awaited_messages(role.name, at, partners)
                if not {name, partners[name]} <= loop.happened.keys()
            )
            yield (
                f"{role.name} stops at {at.name} and waits forever for {missing_messages}, whose other side "
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


def _awaited_messages(role: str, action: Action, partners: Mapping[str, str]) -> Sequence[str]:
    """Returns the messages of its own role that `action` waits for, which need both sides to have begun."""
    waits = () if action.stream == "recv" else action.waits
    names = (qualified_name(role, wait) for wait in waits if "/" not in wait.split("(")[0])
    return [name for name in names if name in partners]


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
