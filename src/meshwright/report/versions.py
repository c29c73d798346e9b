"""What a plan says that does not compute what one device computes: how old the weights are, and what is kept of them."""

from meshwright.core.plan import Plan
from meshwright.core.program import Action
from meshwright.core.steps import steps
from meshwright.core.units import size
from meshwright.core.versions import staleness


def versions_words(plan: Plan) -> dict[str, str]:
    """Rows of a summary of a plan that is not exact: which weights gradients meet, where every micro-batch is an update."""
    if plan.exact:
        return {}
    names = ", ".join(strategy.name for strategy in plan.strategies if not strategy.exact)
    found = {"not exact": f"{names} does not compute what one device computes"}
    lists = [actions for _, actions in plan.program.roles]
    if not any(map(steps, lists)):
        return found
    old = ", ".join(str(staleness(actions)) for actions in lists)
    kept = [rooms(actions) for actions in lists]
    said = ", ".join(f"{len(each)} ({size(sum(each.values()))})" if each else "none" for each in kept)
    updates = f"{plan.num_micro}, one per micro-batch, with gradients at weights that are up to {old} updates old, by stage"
    return found | {"updates per step": updates, "old weights kept": f"{said}, by stage"}


def rooms(actions: tuple[Action, ...]) -> dict[str, int]:
    """The memory in which a rank keeps old versions of its weights: bytes by name."""
    return {hold.name: hold.nbytes for action in actions if action.kind == "STASH" for hold in action.takes}
