"""Simulates a program without devices: when each action runs, and whether the program deadlocks.

Given the duration of each action, `simulate` assigns every action a start and an end under the two rules of
the engine: a stream runs its actions in list order, and an action starts when all that it waits for has
ended. A list that deadlocks is found here, without any device, and shown with an arrow. `TimelineSpan` is the
form that timelines are drawn from, for simulated and for measured steps.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """Returns the timeline of one step, in order of start. Communication starts `comm_delay` after this rank
    is ready for it.

    As in the engine, the main thread of a role goes through its list: it runs compute actions itself and
    issues communication on the way. So a communication starts no earlier than the end of the compute action
    listed before it; one that waits for another role delays later ones on its stream, not the main thread.

    Raises SimulationDeadlock if a cycle, or a wait for an action that does not exist or stands later in the
    same list, stops every unfinished role.
    """
    ended: dict[str, float] = {}
    roles = [_SimulatedRole(role.name, role.actions) for role in program.roles]
    simulated: list[SimulatedAction] = []
    progressed = True
    while progressed:
        before = len(simulated)
        for sim_role in roles:
            simulated += sim_role.advance(ended, duration, comm_delay)
        progressed = len(simulated) > before
    if any(sim_role.blocked_at for sim_role in roles):
        raise SimulationDeadlock(
            "\n".join(
                ["no role can proceed:", *(line for sim_role in roles for line in sim_role.lines(ended))]
            )
        )
    return sorted(simulated, key=lambda simulated_action: (simulated_action.start, simulated_action.end))


class _SimulatedRole:
    def __init__(self, role: str, actions: Sequence[Action]) -> None:
        self.role, self.actions = role, actions
        # by stream, pending actions and when they were issued; each peer has its own stream per direction
        self.issued: dict[StreamKey, deque[tuple[int, float]]] = {}
        self.cursor = 0
        self.free: dict[StreamKey, float] = {}
        self._passed: set[str] = set()  # what the main thread has passed

    @property
    def blocked_at(self) -> list[int]:
        return [queue[0][0] for queue in self.issued.values() if queue] + [
            i for i in [self.cursor] if i < len(self.actions)
        ]

    def advance(
        self,
        ended: dict[str, float],
        duration: Callable[[Action], float],
        comm_delay: Callable[[Action], float],
    ) -> list[SimulatedAction]:
        simulated: list[SimulatedAction] = []
        while True:
            before = len(simulated), self.cursor
            self._walk(ended, duration, simulated)
            for queue in self.issued.values():
                while queue and self._ready(self.actions[queue[0][0]], ended):
                    index, since = queue.popleft()
                    simulated.append(
                        self._run(
                            self.actions[index], since, ended, duration, comm_delay(self.actions[index])
                        )
                    )
            if (len(simulated), self.cursor) == before:
                return simulated

    def lines(self, ended: Mapping[str, float]) -> Iterator[str]:
        if not self.blocked_at:
            yield f"  {self.role}: finished"
        for index in self.blocked_at:
            action = self.actions[index]
            missing = [wait for wait in action.waits if qualified_name(self.role, wait) not in ended]
            position = f"action {index} of {len(self.actions)}, {action.name}"
            yield f"  {self.role}: {position}  <-- waits for {', '.join(missing)}"

    def _walk(
        self, ended: dict[str, float], duration: Callable[[Action], float], simulated: list[SimulatedAction]
    ) -> None:
        while self.cursor < len(self.actions):
            action = self.actions[self.cursor]
            if action.starts_work and self._own_waits_are_issued(action):
                self.issued.setdefault(_stream_key(action), deque()).append(
                    (self.cursor, self.free.get(("compute", None), 0.0))
                )
            elif not action.starts_work and self._ready(action, ended):
                simulated.append(self._run(action, 0.0, ended, duration))
            else:
                return
            self._passed.add(qualified_name(self.role, action.name))
            self.cursor += 1

    def _run(
        self,
        action: Action,
        since: float,
        ended: dict[str, float],
        duration: Callable[[Action], float],
        comm_delay: float = 0.0,
    ) -> SimulatedAction:
        ready = max([since, *(ended[qualified_name(self.role, wait)] for wait in action.waits)])
        start = max(ready + comm_delay, self.free.get(_stream_key(action), 0.0))
        simulated_action = SimulatedAction(self.role, action, start, start + duration(action))
        self.free[_stream_key(action)] = ended[qualified_name(self.role, action.name)] = simulated_action.end
        return simulated_action

    def _ready(self, action: Action, ended: Mapping[str, float]) -> bool:
        return all(qualified_name(self.role, wait) in ended for wait in action.waits)

    def _own_waits_are_issued(self, action: Action) -> bool:
        names = [qualified_name(self.role, wait) for wait in action.waits]
        return all(name in self._passed for name in names if name.startswith(f"{self.role}/"))


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
