"""Checks that each pipeline rank receives what another one sends in the order in which it is sent."""

from collections.abc import Iterator
from itertools import zip_longest

from meshwright.plan.plan import Plan
from meshwright.plan.step.program import Role
from meshwright.plan.step.simulator import qualified_name


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
