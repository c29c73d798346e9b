"""What each rank puts into collectives in one step, as its program states it: also where micro-batches have other rows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import FORWARDS

Message = tuple[str, str, tuple[str, ...], int, str]  # action, collective, axes, bytes that the rank puts in, algorithm


def planned_messages(plan: Plan, rows: Sequence[int] = ()) -> list[Message]:
    """What each rank puts into collectives in one step, in the order of the program.

    `rows` are those of each micro-batch, where they are not the plan's: what is sent for it is what the plan of such ones says.
    """
    others = {each: {action.name: action for action in plan.of_rows(each).actions} for each in set(rows) - {plan.micro_batch}}
    known = [_resized(a, others.get(rows[a.micro], {})) if rows and a.micro is not None else a for a in plan.actions]
    return [
        (action.name, move.collective, tuple(axis for axis in AXES if axis in move.axes), move.nbytes, move.algorithm)
        for action in known
        for move in action.moves
    ]


def _resized(action: Action, others: Mapping[str, Action]) -> Action:
    """`action` with the sizes of `others`, by name.

    Fewer rows may leave room for what a visit computes: then it is not run again there, and moves as much where it is.
    """
    for kind in (action.kind, *(FORWARDS if action.kind in (*FORWARDS, "RERUN") else ())):
        name = replace(action, kind=kind).name
        if name in others:
            return replace(others[name], kind=action.kind)
    return action
