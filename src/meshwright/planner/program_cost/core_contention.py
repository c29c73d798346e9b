"""Simulates a program whose ranks share cores: actions last longer while more cores are wanted than exist.

    alone         rank 0 [F][F]    [B][B]        two cores, three ranks: while all three compute, each gets
                  rank 1    [F][B]               two thirds of a core and takes 1.5 times as long; while two
                  rank 2       [F][F]    [B]     of them wait, the third has a core for itself

The load at a moment depends on when actions run, and this on how long they last. So the simulation is
repeated until both agree. Sending a message needs a core too: if all cores compute, communication is not
hidden for free.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.plan.step.program import Action, Program
from meshwright.plan.step.simulator import SimulatedAction, simulate

MAX_ITERATIONS, CONVERGED_CHANGE = 12, 0.005  # stops when no slowdown changes by more than this fraction


@dataclass(frozen=True)
class SharedCores:
    """The cores of a host, shared by its ranks.

    `ranks_per_role` is the number of ranks of each role on the host; each computes with `threads_per_rank`
    threads.
    """

    num_cores: int
    ranks_per_role: Mapping[str, float]
    threads_per_rank: int = 1

    def cores_used(self, event: SimulatedAction) -> float:
        """Returns the cores that the ranks of a role use for an action."""
        return self.ranks_per_role[event.role] * (
            self.threads_per_rank if event.action.stream == "compute" else 1
        )


def simulate_shared(
    program: Program,
    seconds: Callable[[Action], float],
    shared_cores: SharedCores | None,
    comm_delay: Callable[[Action], float] = lambda action: 0.0,
) -> list[SimulatedAction]:
    """Returns the timeline of `program`, with actions slowed down where ranks share cores.

    `seconds` is the duration of an action that has a core for each thread; `comm_delay` is how much later a
    communication starts. Without `shared_cores` nothing is slowed down.
    """
    events = simulate(program, seconds, comm_delay)
    if shared_cores is None:
        return events
    slowdowns: dict[int, float] = {}
    for _ in range(MAX_ITERATIONS):
        updated = _slowdowns(events, shared_cores)
        max_change = max(
            (abs(value / slowdowns.get(key, 1.0) - 1) for key, value in updated.items()), default=0.0
        )
        slowdowns = {
            key: (value + slowdowns.get(key, 1.0)) / 2 if slowdowns else value
            for key, value in updated.items()
        }
        if max_change < CONVERGED_CHANGE:
            break
        current, mean = slowdowns, _mean_slowdown(events, slowdowns)
        events = simulate(
            program,
            lambda action, current=current: seconds(action) * current.get(id(action), 1.0),
            lambda action, mean=mean: comm_delay(action) * mean,
        )
    return events


def _mean_slowdown(events: Sequence[SimulatedAction], slowdowns: Mapping[int, float]) -> float:
    computed = [
        (event.end - event.start, slowdowns.get(id(event.action), 1.0))
        for event in events
        if event.action.stream == "compute"
    ]
    unslowed = sum(seconds / slowdown for seconds, slowdown in computed)
    return sum(seconds for seconds, _ in computed) / unslowed if unslowed else 1.0


def _slowdowns(events: Sequence[SimulatedAction], shared: SharedCores) -> dict[int, float]:
    """Returns the slowdown of each action: the mean load while it runs."""
    running = [event for event in events if event.end > event.start]
    changes: dict[float, float] = {}
    for event in running:
        changes[event.start] = changes.get(event.start, 0.0) + shared.cores_used(event)
        changes[event.end] = changes.get(event.end, 0.0) - shared.cores_used(event)
    times = sorted(changes)
    cores_wanted = list(accumulate(changes[time] for time in times))
    areas: dict[float, list[float]] = {}
    slowdowns = {}
    for event in running:
        num_cores = (
            float(shared.num_cores)
            if event.action.stream == "compute"
            else max(shared.num_cores, shared.cores_used(event))
        )
        if num_cores not in areas:  # messages were measured with all their ranks at work
            steps = (
                max(1.0, cores / num_cores) * (after - before)
                for cores, (before, after) in zip(cores_wanted, pairwise(times), strict=False)
            )
            areas[num_cores] = [0.0, *accumulate(steps)]
        area = areas[num_cores]
        first, last = (bisect_right(times, time) - 1 for time in (event.start, event.end))
        slowdowns[id(event.action)] = (area[last] - area[first]) / (event.end - event.start)
    return slowdowns
