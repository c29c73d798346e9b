"""A program played on paper: who does what when, and whether anybody waits for ever.

Given how long each action takes, `play` gives every action a start and an end under the two rules of the engine: a
lane runs its actions in list order, and an action starts when all it waits for has ended. A list in which somebody
waits for ever is found here, on a laptop, and shown with an arrow.

Acts of ranks in time, by whatever clock: of a schedule played on paper, or of one that ran. What drawings are made of.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.plan.step.action import Action, Program, StreamName

StreamKey = tuple[StreamName, int | None]  # a lane, and the other rank of what goes on it


@dataclass(frozen=True)
class SimulatedAction:
    """One action of one role with its start and end, in the unit of the durations."""

    role: str
    action: Action
    start: float
    end: float


class SimulationDeadlock(Exception):
    """Nobody can go on. The message shows, for every role, where it stands and what it waits for."""


def simulate(
    program: Program,
    duration: Callable[[Action], float] = lambda action: 1.0,
    comm_delay: Callable[[Action], float] = lambda action: 0.0,
) -> list[SimulatedAction]:
    """The timeline of one step, in order of start. What goes on the wire starts so `late` after this rank is ready for it.

    As in the engine, a role's main thread goes through its list: it does compute actions itself and issues wire actions
    on the way. So a wire action starts no earlier than the compute action listed before it has ended; one that waits for
    another role holds up what follows on the wire, not what the main thread does next.

    Raises Stuck when a cycle, or a wait for an action that does not exist or stands later in the same list, stops every
    role that is not finished.
    """
    ended: dict[str, float] = {}
    players = [_SimulatedRole(role, actions) for role, actions in program.roles]
    ticks: list[SimulatedAction] = []
    moved = True
    while moved:
        before = len(ticks)
        for player in players:
            ticks += player.advance(ended, duration, comm_delay)
        moved = len(ticks) > before
    if any(player.blocked_at for player in players):
        raise SimulationDeadlock(
            "\n".join(["nobody can go on:", *(line for player in players for line in player.lines(ended))])
        )
    return sorted(ticks, key=lambda tick: (tick.start, tick.end))


class _SimulatedRole:
    """One role on paper: how far its main thread has come, and the wire actions that it has issued."""

    def __init__(self, role: str, actions: Sequence[Action]) -> None:
        self.role, self.actions = role, actions
        # by lane, actions that have not ended, and when they were issued; each way to or from another rank is a lane of its own
        self.issued: dict[StreamKey, deque[tuple[int, float]]] = {}
        self.cursor = 0
        self.free: dict[StreamKey, float] = {}
        self._own: set[str] = set()  # what the main thread has passed

    @property
    def blocked_at(self) -> list[int]:
        """Where the other lanes and the main thread stand; empty when all has ended."""
        return [lane[0][0] for lane in self.issued.values() if lane] + [
            i for i in [self.cursor] if i < len(self.actions)
        ]

    def advance(
        self,
        ended: dict[str, float],
        duration: Callable[[Action], float],
        comm_delay: Callable[[Action], float],
    ) -> list[SimulatedAction]:
        """What this role does until it waits for another one; `ended` learns of it."""
        ticks: list[SimulatedAction] = []
        while True:
            before = len(ticks), self.cursor
            self._walk(ended, duration, ticks)
            for lane in self.issued.values():
                while lane and self._ready(self.actions[lane[0][0]], ended):
                    index, since = lane.popleft()
                    ticks.append(
                        self._run(
                            self.actions[index], since, ended, duration, comm_delay(self.actions[index])
                        )
                    )
            if (len(ticks), self.cursor) == before:
                return ticks

    def lines(self, ended: Mapping[str, float]) -> Iterator[str]:
        """Where this role stands, and what it waits for."""
        if not self.blocked_at:
            yield f"  {self.role}: finished"
        for index in self.blocked_at:
            action = self.actions[index]
            missing = [wait for wait in action.waits if qualified_name(self.role, wait) not in ended]
            yield f"  {self.role}: action {index} of {len(self.actions)}, {action.name}  <-- waits for {', '.join(missing)}"

    def _walk(
        self, ended: dict[str, float], duration: Callable[[Action], float], ticks: list[SimulatedAction]
    ) -> None:
        while self.cursor < len(self.actions):
            action = self.actions[self.cursor]
            if action.stream != "compute" and self._own_waits_stand_before(action):
                self.issued.setdefault(_way(action), deque()).append(
                    (self.cursor, self.free.get(("compute", None), 0.0))
                )
            elif action.stream == "compute" and self._ready(action, ended):
                ticks.append(self._run(action, 0.0, ended, duration))
            else:
                return
            self._own.add(qualified_name(self.role, action.name))
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
        start = max(ready + comm_delay, self.free.get(_way(action), 0.0))
        tick = SimulatedAction(self.role, action, start, start + duration(action))
        self.free[_way(action)] = ended[qualified_name(self.role, action.name)] = tick.end
        return tick

    def _ready(self, action: Action, ended: Mapping[str, float]) -> bool:
        return all(qualified_name(self.role, wait) in ended for wait in action.waits)

    def _own_waits_stand_before(self, action: Action) -> bool:
        """An action of another lane is issued once: what it needs of its own role must have been listed before it."""
        names = [qualified_name(self.role, wait) for wait in action.waits]
        return all(name in self._own for name in names if name.startswith(f"{self.role}/"))


def _way(action: Action) -> StreamKey:
    return action.stream, None if action.transfer is None else action.transfer.peer


def qualified_name(role: str, wait: str) -> str:
    """The name of an action across roles; a wait without a role means one's own."""
    return wait if "/" in wait.split("(")[0] else f"{role}/{wait}"


@dataclass(frozen=True)
class TimelineSpan:
    """One act of a rank: F, B, I or W of a micro-batch, or ~ while it waits for a message. Times in any one unit.

    `chunk` counts the parts of the rank. `held` is what the rank holds during this act, `left` after it, in any unit.
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
        """F3; f3 for the second part of a rank, F3 again for the third."""
        if self.kind == "~":
            return self.kind
        return f"{self.kind.lower() if self.virtual_stage % 2 else self.kind}{self.microbatch}"


SpansByRank = Sequence[Sequence[TimelineSpan]]  # of each rank, in the order of time
