"""What each rank puts into collectives in one step, as its program states it: also where micro-batches have other rows.

Of other lengths, too: what is sent for such a micro-batch is what the plan of such rows says; for that the model is read on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshwright.core.mesh import AXES
from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import FORWARDS
from meshwright.engine.rows import Shapes
from meshwright.verifier.reference import Case

Message = tuple[str, str, tuple[str, ...], int, str]  # action, collective, axes, bytes that the rank puts in, algorithm


class Stated:
    """What the ranks of `case.plan` put into collectives, for micro-batches of any shapes."""

    def __init__(self, case: Case) -> None:
        self._case = case
        columns = (*case.plan.anatomy.inputs, *case.plan.anatomy.targets)
        self._known = {column.name for column in columns}
        self._plans = {frozenset((column.name, column.shape) for column in columns): case.plan}  # by the shapes of one row

    def messages(self, rank: int, steps: Sequence[tuple[Shapes, ...]]) -> Iterator[tuple[int, Message]]:
        """Those of `rank`, each with its step: `steps` are the shapes of its micro-batches; none: as planned."""
        mine, others, known = self._case.plan.at(rank), dict[Shapes, Plan](), dict[tuple[Shapes, ...], list[Message]]()
        for step, micros in enumerate(steps):
            for shapes in set(micros) - others.keys():
                others[shapes] = self._on(rank, step, shapes)
            if micros not in known:
                known[micros] = planned_messages(mine, [others[shapes] for shapes in micros])
            yield from ((step, message) for message in known[micros])

    def _on(self, rank: int, step: int, shapes: Shapes) -> Plan:
        """The plan of micro-batches of these shapes, as `rank` plays it; `step` has such ones."""
        rows, lengths = shapes[0][1][0], frozenset((name, shape[1:]) for name, shape in shapes if name in self._known)
        if lengths not in self._plans:
            batch = self._case.rows(self._case.plan, rank)(step)
            self._plans[lengths] = self._case.plan if batch is None else self._case.on(batch)
        there = self._plans[lengths].at(rank)
        return there if rows == there.micro_batch else there.of_rows(rows)


def planned_messages(plan: Plan, micros: Sequence[Plan] = ()) -> list[Message]:
    """What each rank puts into collectives in one step, in the order of the program.

    `micros` are by micro-batch the plans that say what is sent for it, where its rows may be others than those of `plan`.
    """
    others = {id(each): {action.name: action for action in each.actions} for each in micros}
    known = [_resized(a, others[id(micros[a.micro])]) if micros and a.micro is not None else a for a in plan.actions]
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
