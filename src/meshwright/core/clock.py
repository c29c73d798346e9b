"""A program played on paper: who does what when, and whether anybody waits for ever.

Given how long each action takes, `play` gives every action a start and an end under the two rules of the engine: a
lane runs its actions in list order, and an action starts when all it waits for has ended. A list in which somebody
waits for ever is found here, on a laptop, and shown with an arrow.
"""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.core.program import Action, Program


@dataclass(frozen=True)
class Tick:
    """One action of one role with its start and end, in the unit of the durations."""

    role: str
    action: Action
    start: float
    end: float


class Stuck(Exception):
    """Nobody can go on. The message shows, for every role, where it stands and what it waits for."""


def play(program: Program, duration: Callable[[Action], float] = lambda action: 1.0) -> list[Tick]:
    """The timeline of one step, in order of start.

    Compute actions that a wire action follows in the list have been started before it: the engine's main thread
    issues wire actions, so a wire action starts no earlier than the compute action listed before it has ended.

    Raises Stuck when a cycle, or a wait for an action that does not exist, stops every role that is not finished.
    """
    ended: dict[str, float] = {}
    cursor = {role: 0 for role, _ in program.roles}
    free = {(role, lane): 0.0 for role, _ in program.roles for lane in ("compute", "wire")}
    ticks: list[Tick] = []
    moved = True
    while moved:
        moved = False
        for role, actions in program.roles:
            while cursor[role] < len(actions):
                action = actions[cursor[role]]
                waits = [full_name(role, wait) for wait in action.waits]
                if any(wait not in ended for wait in waits):
                    break
                ready = [free[role, action.lane], *(ended[wait] for wait in waits)]
                if action.lane == "wire":
                    ready.append(free[role, "compute"])
                start = max(ready)
                tick = Tick(role, action, start, start + duration(action))
                free[role, action.lane] = ended[full_name(role, action.name)] = tick.end
                ticks.append(tick)
                cursor[role] += 1
                moved = True
    if any(cursor[role] < len(actions) for role, actions in program.roles):
        raise Stuck(_stuck_table(program, cursor, ended))
    return sorted(ticks, key=lambda tick: (tick.start, tick.end))


def full_name(role: str, wait: str) -> str:
    """The name of an action across roles; a wait without a role means one's own."""
    return wait if "/" in wait.split("(")[0] else f"{role}/{wait}"


def _stuck_table(program: Program, cursor: dict[str, int], ended: dict[str, float]) -> str:
    lines = ["nobody can go on:"]
    for role, actions in program.roles:
        if cursor[role] == len(actions):
            lines.append(f"  {role}: finished")
            continue
        action = actions[cursor[role]]
        missing = [wait for wait in action.waits if full_name(role, wait) not in ended]
        lines.append(f"  {role}: action {cursor[role]} of {len(actions)}, {action.name}  <-- waits for {', '.join(missing)}")
    return "\n".join(lines)
