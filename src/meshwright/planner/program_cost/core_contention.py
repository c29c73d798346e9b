"""A program played where several ranks share cores: each act lasts longer while more is done than there are
cores for.

    alone         rank 0 [F][F]    [B][B]        two cores, three ranks: while all three compute, each gets
                                                 two thirds
                  rank 1    [F][B]               of a core, and what it does takes half as long again; while
                                                 two wait,
                  rank 2       [F][F]    [B]     the third has a core for itself

How much is done at once follows from when acts are done, and that from how long they last: so the program is
played again until both agree. What moves messages takes a core as well, so that on a machine whose cores all
compute nothing is hidden for free.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.plan.step.action import Action, Program
from meshwright.plan.step.simulator import SimulatedAction, simulate

MAX_ITERATIONS, CONVERGED_CHANGE = 12, 0.005  # at most so often; until no act changes by more than this share


@dataclass(frozen=True)
class SharedCores:
    """`cores` of a host, shared by so many ranks of each role, of which each computes with `threads`."""

    num_cores: int
    ranks_per_role: Mapping[str, float]
    threads_per_rank: int = 1

    def cores_used(self, tick: SimulatedAction) -> float:
        """The cores that the ranks of a role want for what they do."""
        return self.ranks_per_role[tick.role] * (
            self.threads_per_rank if tick.action.stream == "compute" else 1
        )


def simulate_shared(
    program: Program,
    seconds: Callable[[Action], float],
    shared_cores: SharedCores | None,
    comm_delay: Callable[[Action], float] = lambda action: 0.0,
) -> list[SimulatedAction]:
    """The timeline of `program`, whose acts take so many `seconds` with a core for each thread; `shared`
    None: they have that.

    What goes on the wire starts so `late`, and as much later as what is computed takes longer.
    """
    ticks = simulate(program, seconds, comm_delay)
    if shared_cores is None:
        return ticks
    longer: dict[int, float] = {}
    for _ in range(MAX_ITERATIONS):
        wanted = _slowdowns(ticks, shared_cores)
        changed = max((abs(value / longer.get(key, 1.0) - 1) for key, value in wanted.items()), default=0.0)
        longer = {
            key: (value + longer.get(key, 1.0)) / 2 if longer else value for key, value in wanted.items()
        }
        if changed < CONVERGED_CHANGE:
            break
        known, all_ = longer, _mean_slowdown(ticks, longer)
        ticks = simulate(
            program,
            lambda action, known=known: seconds(action) * known.get(id(action), 1.0),
            lambda action, all_=all_: comm_delay(action) * all_,
        )
    return ticks


def _mean_slowdown(ticks: Sequence[SimulatedAction], longer: Mapping[int, float]) -> float:
    """How many times as long what is computed takes, on average."""
    computed = [
        (tick.end - tick.start, longer.get(id(tick.action), 1.0))
        for tick in ticks
        if tick.action.stream == "compute"
    ]
    alone = sum(seconds / times for seconds, times in computed)
    return sum(seconds for seconds, _ in computed) / alone if alone else 1.0


def _slowdowns(ticks: Sequence[SimulatedAction], shared: SharedCores) -> dict[int, float]:
    """How many times as long each act takes, by the mean of what is wanted meanwhile."""
    busy = [tick for tick in ticks if tick.end > tick.start]
    changes: dict[float, float] = {}
    for tick in busy:
        changes[tick.start] = changes.get(tick.start, 0.0) + shared.cores_used(tick)
        changes[tick.end] = changes.get(tick.end, 0.0) - shared.cores_used(tick)
    times = sorted(changes)
    wanted = list(accumulate(changes[time] for time in times))
    areas: dict[float, list[float]] = {}
    found = {}
    for tick in busy:
        room = (
            float(shared.num_cores)
            if tick.action.stream == "compute"
            else max(shared.num_cores, shared.cores_used(tick))
        )
        if room not in areas:  # messages were measured with all that take part in them
            steps = (
                max(1.0, here / room) * (after - before)
                for here, (before, after) in zip(wanted, pairwise(times), strict=False)
            )
            areas[room] = [0.0, *accumulate(steps)]
        area = areas[room]
        first, last = (bisect_right(times, time) - 1 for time in (tick.start, tick.end))
        found[id(tick.action)] = (area[last] - area[first]) / (tick.end - tick.start)
    return found
