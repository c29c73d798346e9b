"""What can be proved of gradients that ranks along pp sum (core/ties.py): who takes part, when, and in which order.

A sum that leaves out one of the ranks that use a weight, or begins before another one of the same gradients has ended, gives
numbers that nobody can tell from right ones; ranks that come to their sums in unlike orders wait for ever.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest

from meshwright.core.plan import Plan
from meshwright.core.program import Action, all_waits
from meshwright.core.steps import role_of
from meshwright.core.ties import summing


def tie_faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """Every fault of the sums along pp, each with the role that has it."""
    lists = [[action for action in actions if action.kind == "TIE"] for _, actions in plan.program.roles]
    if not any(lists):
        return
    for ties, (role, actions), view in zip(lists, plan.program.roles, plan.views(), strict=True):
        users = {home.weight.name: view.space.users(home.weight) for home in view.space.logical}
        for tie in ties:
            yield from ((role, text) for text in _faults(tie, actions, users, plan))
    for one, other in combinations(range(len(lists)), 2):
        mine, theirs = (list(_met(lists[a], b, plan)) for a, b in ((one, other), (other, one)))
        for left, right in zip_longest(mine, theirs):
            if left != right:
                said = " and ".join(tie[0] if tie else "nothing" for tie in (left, right))
                text = f"it meets {role_of({'pp': other})} along pp in unlike sums: {said} come at the same place"
                yield role_of({"pp": one}), text
                break


def _faults(tie: Action, actions: Sequence[Action], users: dict[str, tuple[int, ...]], plan: Plan) -> Iterator[str]:
    meeting = _among(tie, plan)
    wrong = [name for name in tie.tensors if users.get(name) != meeting]
    if wrong:
        text = f"{tie.name} adds up what the ranks at {_said(meeting)} of pp have of the gradient of {wrong[0]}"
        yield f"{text}, which those at {_said(users.get(wrong[0], ()))} use"
    awaited = all_waits(actions, tie)
    for other in actions:
        if other != tie and summing(other) and set(tie.tensors).intersection(other.tensors) and other.name not in awaited:
            yield f"{tie.name} does not wait for {other.name}, which changes the gradient of {tie.tensors[0]}"


def _met(ties: Sequence[Action], other: int, plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Of the sums `ties` those in which the rank at `other` takes part: what must be the same on both."""
    for tie in ties:
        if tie.transfer is not None and other in _among(tie, plan):
            yield tie.name, tie.transfer.nbytes, tie.transfer.dtype


def _among(tie: Action, plan: Plan) -> tuple[int, ...]:
    return () if tie.transfer is None else tie.transfer.among or tuple(range(plan.mesh.pp))


def _said(indices: Sequence[int]) -> str:
    return " and ".join(map(str, indices)) or "no place"
