"""Posts receives one run of a stage ahead, so that a message travels while the rank computes.

    without    F 0           RECV x 1   F 1           RECV x 2   F 2
    with       RECV x 1   F 0           RECV x 2   F 1           F 2         x 1 arrives during F 0

On a GPU a message occupies the device of both ranks from its post until both have posted it, and a rank may
have to wait for its device at any time: memory is freed, a kernel is loaded. It waits for ever if the message
needs its own next run. So each receive has a window, which follows from the schedule:

    runs needed(a)[r] = the number of runs of rank r that must have ended when the run a has ended
                      = max over the run listed before a, and the runs that a waits for; and a itself

    first    the message of the run a of rank q is posted by rank r after runs needed(a)[r] of its own runs:
             earlier, the receive would need r's next run
    last     and before the first run b of r with runs needed(b)[q] > runs needed(a)[q]: later, the send would
             need q's next run

Mostly one run ahead is within the window. A skip connection, which is needed long after it is sent, is
received early and kept. The check is verifier/nccl_deadlocks.py. Cost: one row of p numbers for each run.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

import numpy as np

from meshwright.parallel.pipeline.schedules.schedule import Dependency, Schedule
from meshwright.plan.event_loop import EventLoop
from meshwright.plan.step.program import Action


class ReceiveWindow(NamedTuple):
    """A receive may be posted before any run of its rank from number `first` to number `last`."""

    first: int
    last: int


class RunsNeeded:
    """How many runs of each rank must have ended when each run of `schedule` has ended."""

    def __init__(self, schedule: Schedule) -> None:
        size = schedule.num_ranks
        self._by_rank = [np.zeros((len(runs) + 1, size), dtype=np.int32) for runs in schedule.actions]
        self._places: dict[Dependency, tuple[int, int]] = {}
        cursors = [0] * size
        loop = EventLoop[Dependency](size)

        def run_list(rank: int, _: float) -> None:
            rows = self._by_rank[rank]
            for action in islice(schedule.actions[rank], cursors[rank], None):
                dependencies = schedule.dependencies_of(action)
                if loop.arrival(dependencies, rank) is None:
                    return
                number = cursors[rank] = cursors[rank] + 1
                rows[number] = rows[number - 1]
                for dependency in dependencies:
                    np.maximum(rows[number], self.needed_by(dependency), out=rows[number])
                rows[number, rank] = number
                output = schedule.output_of(action)
                if output is not None:
                    self._places[output] = rank, number
                    loop.happen(output, 0.0, rank)

        loop.run(run_list)

    def needed_by(self, run: Dependency) -> np.ndarray:
        """Returns the number of runs of each rank that `run` needs: int32 [ranks]."""
        rank, number = self._places[run]
        return self._by_rank[rank][number]

    def window(self, sender: Dependency, rank: int, *, is_forwarded: bool) -> ReceiveWindow:
        """Returns when `rank` may post the receive of what the run `sender` sends.

        A value that the stage only forwards is sent before the run.
        """
        source, number = self._places[sender]
        last = bisect_right(self._by_rank[rank][1:, source], number - is_forwarded)
        return ReceiveWindow(int(self.needed_by(sender)[rank]), last)


def post_receives_early(
    actions: Sequence[Action], run_starts: Set[tuple[str, str]], windows: Mapping[str, ReceiveWindow]
) -> Iterator[Action]:
    """Yields `actions` with each receive before the run that precedes its own, or within its window.

    A run starts at an action whose kind and subject are in `run_starts`. What stands between a receive and
    the run that needs it (CONCAT, sends of a value that is only forwarded) may wait for it, and stays behind
    all receives there. Receives from one rank stay in their order.
    """
    runs: list[list[Action]] = [[]]  # the first is what comes before all runs
    forwards: list[list[Action]] = [[]]  # what stands between the receives of a run and the run
    receives: defaultdict[int, list[Action]] = defaultdict(list)  # by the number of the run behind them
    earliest: defaultdict[int | None, int] = defaultdict(int)  # by peer
    is_before_run = False
    for action in actions:
        own = len(runs) - 1
        if (action.kind, action.subject) in run_starts:
            runs.append([action])
            forwards.append([])
            is_before_run = False
        elif action.stream == "recv":
            # a run of the same microbatch adds up gradients of the same values
            adds_up = action.kind == "RECV_GRAD" and own and runs[-1][0].microbatch == action.microbatch
            peer = action.transfer.peer if action.transfer else None
            first, last = windows[action.name]
            number = min(max(own if adds_up else own - 1, first), last)
            earliest[peer] = max(number, earliest[peer], 0)
            receives[earliest[peer]].append(action)
            is_before_run = True
        else:
            is_forward = action.kind == "SEND" and any(wait.startswith("RECV(") for wait in action.waits)
            is_before_run = is_before_run or is_forward
            (forwards if is_before_run else runs)[-1].append(action)
    yield from runs[0]
    for number, run in enumerate([*runs[1:], []]):
        yield from receives[number]
        yield from forwards[number]
        yield from run
