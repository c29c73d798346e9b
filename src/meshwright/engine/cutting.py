"""Whether a plan does anything between the backwards of two blocks, so that the graph must be cut there.

Where it does not, the backward of the whole model, or of a part of it, is one call: no leaf at each block, and tens of
microseconds a block less, which thin blocks show.

    part      F F F F  ...  B B B B                one graph
    beside    F F F F  ...  B PACK B PACK B B      a graph for each block
"""

from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import LEAN


def cuts_blocks(plan: Plan) -> bool:
    """Whether the graph of a forward is cut at the borders of blocks; a part is one where its backwards stand side by side."""
    actions = plan.actions
    kinds = {action.kind for action in actions}
    if (
        plan.mesh.extent(plan.space.summed_axes) > 1
        or LEAN in kinds
        or "B" not in kinds
        or any(action.inner for action in actions)
    ):
        return True
    if not plan.space.stages:
        backwards = [i for i, action in enumerate(actions) if action.kind == "B"]
        return backwards[-1] - backwards[0] >= len(backwards)
    return plan.space.anatomy.in_place or "I" in kinds or _interrupted(plan, actions)


def _interrupted(plan: Plan, actions: tuple[Action, ...]) -> bool:
    """Whether anything else stands within the backwards of a part for one micro-batch, or a part is left out."""
    at = {(action.subject, action.micro): i for i, action in enumerate(actions) if action.kind == "B"}
    mine = [part.visits for part in plan.space.parts if part.visits[0] in plan.space.anatomy.visits]
    micros = {micro for _, micro in at}
    spans = [(at.get((visits[-1], micro)), at.get((visits[0], micro)), len(visits)) for visits in mine for micro in micros]
    return any(last is not None and first is not None and first - last >= length for last, first, length in spans)
