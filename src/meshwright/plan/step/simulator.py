"""Simulates a program without devices: when each action runs, and whether the program deadlocks.

Actions that the next step waits for (`previous_waits`) run beside it: in the timeline of a step they are
those of the step before, and come first.

Given the duration of each action, `simulate` assigns every action a start and an end under the two rules of
the engine: a stream runs its actions in list order, and an action starts when all that it waits for has
ended. A list that deadlocks is found here, without any device, and shown with an arrow. `TimelineSpan` is the
form that timelines are drawn from, for simulated and for measured steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from meshwright.plan.event_loop import EventLoop
from meshwright.plan.hardware.streams import STREAMS, StreamName
from meshwright.plan.step.program import Action, Program

StreamKey = tuple[StreamName, int | None]  # a stream, and the peer of its transfers


@dataclass(frozen=True)
class SimulatedAction:
    """One action of one role with its start and end, in the unit of the durations."""

    role: str
    action: Action
    start: float
    end: float


class SimulationDeadlock(Exception):
    """No role can proceed. The message shows the position of every role and what it waits for."""


def simulate(
    program: Program,
    duration: Callable[[Action], float] = lambda action: 1.0,
    comm_delay: Callable[[Action], float] = lambda action: 0.0,
) -> list[SimulatedAction]:
    """Returns the timeline of one step, in order of start and end, then of roles and their lists.
    Communication starts `comm_delay` after this rank is ready for it.

    As in the engine, the main thread of a role goes through its list: it runs compute actions itself and
    issues communication on the way. So a communication starts no earlier than the end of the compute action
    listed before it; one that waits for another role delays later ones on its stream, not the main thread.

    Raises SimulationDeadlock if a cycle, or a wait for an action that does not exist or stands later in the
    same list, stops every unfinished role.
    """
    loop = EventLoop[str](len(program.roles))
    roles = [
        _SimulatedRole(number, role.name, steady_order(role.actions), loop)
        for number, role in enumerate(program.roles)
    ]
    loop.run(lambda number, _: roles[number].advance(duration, comm_delay))
    if any(sim_role.blocked_at for sim_role in roles):
        lines = (line for sim_role in roles for line in sim_role.lines())
        raise SimulationDeadlock("\n".join(["no role can proceed:", *lines]))
    simulated = (sim_role.simulated[index] for sim_role in roles for index in range(len(sim_role.actions)))
    return sorted(simulated, key=lambda simulated_action: (simulated_action.start, simulated_action.end))


def steady_order(actions: Sequence[Action]) -> list[tuple[Action, tuple[str, ...]]]:
    """Returns `actions`, each with what it waits for, as they run in every step but the first: what the step
    before has left comes first, and waits for nothing of this step.
    """
    left = {name for action in actions for name in action.previous_waits}
    carried = [(action, ()) for action in actions if action.name in left]
    others = (action for action in actions if action.name not in left)
    return [*carried, *((action, (*action.waits, *action.previous_waits)) for action in others)]


class _SimulatedRole:
    """One worker of the event loop: the main thread of a role and its streams of communication."""

    def __init__(
        self,
        number: int,
        role: str,
        order: Sequence[tuple[Action, tuple[str, ...]]],
        loop: EventLoop[str],
    ) -> None:
        self.number, self.role, self._loop = number, role, loop
        self.actions = [action for action, _ in order]
        self.simulated: dict[int, SimulatedAction] = {}  # by index
        self._cursor = 0
        self._names = [qualified_name(role, action.name) for action in self.actions]
        self._stated_waits = [waits for _, waits in order]
        self._waits = [[qualified_name(role, wait) for wait in waits] for waits in self._stated_waits]
        self._passed: set[str] = set()  # what the main thread has passed
        # by stream, pending actions and when they were issued; each peer has its own stream per direction
        self._issued: dict[StreamKey, deque[tuple[int, float]]] = {}
        self._free: dict[StreamKey, float] = {}

    @property
    def blocked_at(self) -> list[int]:
        heads = [queue[0][0] for queue in self._issued.values() if queue]
        return [*heads, self._cursor] if self._cursor < len(self.actions) else heads

    def advance(self, duration: Callable[[Action], float], comm_delay: Callable[[Action], float]) -> None:
        """Runs and issues what can be; `happen` wakes the role again for what waits for that."""
        while self._cursor < len(self.actions):
            action, name = self.actions[self._cursor], self._names[self._cursor]
            if not action.starts_work:
                if not self._run(self._cursor, 0.0, duration):
                    break
            elif all(wait in self._passed for wait in self._own_waits(self._cursor)):
                issued = self._cursor, self._free.get(("compute", None), 0.0)
                self._issued.setdefault(_stream_key(action), deque()).append(issued)
            else:
                break
            self._passed.add(name)
            self._cursor += 1
        for queue in self._issued.values():
            while queue and self._run(*queue[0], duration, comm_delay):
                queue.popleft()

    def lines(self) -> Iterator[str]:
        if not self.blocked_at:
            yield f"  {self.role}: finished"
        for index in self.blocked_at:
            action, happened = self.actions[index], self._loop.happened
            missing = [
                wait
                for wait, name in zip(self._stated_waits[index], self._waits[index], strict=True)
                if name not in happened
            ]
            position = f"action {index} of {len(self.actions)}, {action.name}"
            yield f"  {self.role}: {position}  <-- waits for {', '.join(missing)}"

    def _run(
        self,
        index: int,
        issued_at: float,
        duration: Callable[[Action], float],
        comm_delay: Callable[[Action], float] = lambda action: 0.0,
    ) -> bool:
        """Runs an action if all that it waits for has an end."""
        action, ready = self.actions[index], self._loop.arrival(self._waits[index], self.number)
        if ready is None:
            return False
        key = _stream_key(action)
        start = max(max(issued_at, ready) + comm_delay(action), self._free.get(key, 0.0))
        end = self._free[key] = start + duration(action)
        self.simulated[index] = SimulatedAction(self.role, action, start, end)
        self._loop.happen(self._names[index], end, self.number)
        return True

    def _own_waits(self, index: int) -> Iterator[str]:
        return (wait for wait in self._waits[index] if wait.startswith(f"{self.role}/"))


def _stream_key(action: Action) -> StreamKey:
    if action.transfer is None or not STREAMS[action.stream].in_order_per_peer:
        return action.stream, None
    return action.stream, action.transfer.peer


def qualified_name(role: str, wait: str) -> str:
    """Returns the name of an action across roles; a wait without a role refers to `role` itself."""
    return wait if "/" in wait.split("(")[0] else f"{role}/{wait}"


@dataclass(frozen=True)
class TimelineSpan:
    """One action of a rank: F, B, I or W of a microbatch, or ~ while it waits for a message. Times in any
    one unit.

    `virtual_stage` counts the stages of the rank. `memory` is held during the action, `memory_after` after
    it, in any unit.
    """

    kind: str
    begin: float
    end: float
    microbatch: int = 0
    virtual_stage: int = 0
    memory: float = 0.0
    memory_after: float = 0.0

    @property
    def label(self) -> str:
        """F3; f3 for the second stage of a rank, F3 again for the third."""
        if self.kind == "~":
            return self.kind
        return f"{self.kind.lower() if self.virtual_stage % 2 else self.kind}{self.microbatch}"


SpansByRank = Sequence[Sequence[TimelineSpan]]  # one sequence per rank, in order of time
