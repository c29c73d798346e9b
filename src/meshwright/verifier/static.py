"""What can be proved of a program without running it.

Reads the list of every role and reports, all at once: names that are not unique, waits for actions that do not exist,
lists in which somebody waits for ever, a backward before its forward, a gradient that no transfer brings to where the
optimizer wants it (or too early, or after the clip), and memory taken and not returned.
"""

from collections.abc import Iterator, Sequence

from meshwright.core.clock import Stuck, full_name, play
from meshwright.core.errors import Fault
from meshwright.core.plan import Plan
from meshwright.core.program import Action, Program

_FIX = "a strategy's rewrite broke the list: run `meshwright plan` without one strategy after the other to find which"


def prove(plan: Plan) -> list[Fault]:
    """Every fault of the plan's program; an empty list is the proof."""
    faults: list[Fault] = []
    for role, actions in plan.program.roles:
        faults += [Fault(text, _FIX, f"program.{role}") for text in _order_faults(plan.program, role, actions)]
        faults += [Fault(text, _FIX, f"program.{role}") for text in _memory_faults(actions)]
        faults += [Fault(text, _FIX, f"program.{role}") for text in _gradient_faults(plan, actions)]
    try:
        play(plan.program)
    except Stuck as stuck:
        faults.append(Fault(str(stuck), _FIX, "program"))
    return faults


def _order_faults(program: Program, role: str, actions: Sequence[Action]) -> Iterator[str]:
    everywhere = {full_name(other, action.name) for other, listed in program.roles for action in listed}
    at: dict[str, int] = {}
    for index, action in enumerate(actions):
        if action.name in at:
            yield f"{action.name} stands twice, as actions {at[action.name]} and {index}"
        at[action.name] = index
        for wait in action.waits:
            if full_name(role, wait) not in everywhere:
                yield f"{action.name} waits for {wait}, which nobody plays"
    for action in actions:
        forward = f"F({action.subject}, {action.micro})"
        if action.kind == "B" and at.get(forward, len(actions)) > at[action.name]:
            yield f"{action.name} comes before its forward, or without one"
        if action.kind == "F" and f"B({action.subject}, {action.micro})" not in at:
            yield f"{action.name} has no backward"


def _memory_faults(actions: Sequence[Action]) -> Iterator[str]:
    held: dict[str, str] = {}
    for action in actions:
        for name in action.frees:
            if held.pop(name, None) is None:
                yield f"{action.name} frees {name}, which is not held"
        for hold in action.takes:
            if hold.name in held:
                yield f"{action.name} takes {hold.name}, which {held[hold.name]} holds already"
            held[hold.name] = action.name
    for name, taker in held.items():
        yield f"{taker} takes {name}, and nobody frees it"


def _gradient_faults(plan: Plan, actions: Sequence[Action]) -> Iterator[str]:
    """A gradient that backward leaves as a summand must be moved after its last backward, and before CLIP starts."""
    index = {action.name: i for i, action in enumerate(actions)}
    clip = next((action for action in actions if action.kind == "CLIP"), None)
    if clip is None or not any(action.kind == "STEP" for action in actions):
        yield "there is no CLIP and STEP: the parameters would never change"
        return
    before_clip = _all_waits(actions, clip)
    for home in plan.space.homes:
        if not home.weight.trainable:
            continue
        backwards = [
            i
            for i, a in enumerate(actions)
            if a.kind == "B" and (a.subject in home.weight.visits or "(root)" in home.weight.visits)
        ]
        for axis, act in home.moves().items():
            movers = [
                a
                for a in actions
                if home.weight.name in a.tensors and a.transfer and axis in a.transfer.axes and a.transfer.collective == act
            ]
            if not movers:
                yield f"the gradient of {home.weight.name} stays a pending sum over {axis}: no {act} moves it"
            elif len(movers) > 1:
                names = ", ".join(mover.name for mover in movers)
                yield f"the gradient of {home.weight.name} is moved {len(movers)} times over {axis}: {names}"
            elif backwards and index[movers[0].name] < max(backwards):
                late = actions[max(backwards)].name
                yield f"{movers[0].name} moves the gradient of {home.weight.name} before {late} has added to it"
            elif movers[0].name not in before_clip:
                yield f"CLIP does not wait for {movers[0].name}, which moves the gradient of {home.weight.name}"


def _all_waits(actions: Sequence[Action], action: Action) -> set[str]:
    """The names of all that `action` waits for, directly or through others."""
    by_name = {other.name: other for other in actions}
    todo, known = [action], set()
    while todo:
        for wait in todo.pop().waits:
            if wait in by_name and wait not in known:
                known.add(wait)
                todo.append(by_name[wait])
    return known
