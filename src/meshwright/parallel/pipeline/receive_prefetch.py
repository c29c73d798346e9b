"""Posts receives one run of a stage ahead, so that a message travels while the rank computes.

    without    F 0           RECV x 1   F 1           RECV x 2   F 2
    with       RECV x 1   F 0           RECV x 2   F 1           F 2         x 1 arrives during F 0

A receive is not posted before a run on which it depends. It could not arrive earlier anyway; and on a GPU a
posted receive occupies the device until its message comes, so a rank that waits for its device meanwhile
(memory is freed, a kernel is loaded) would wait for a message that needs its own next run. What a message
depends on follows from the schedule:

    runs needed(a)[r] = the number of runs of rank r that must have ended before the run a can begin
                      = max over the run listed before a, and the runs that a waits for, with themselves

A message from the run a may be posted before the i-th run of rank r if runs needed(a)[r] <= i. The check is
verifier/nccl_deadlocks.py. Cost: one row of p numbers for each run of the schedule.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice

import numpy as np

from meshwright.parallel.pipeline.schedules.schedule import Dependency, Schedule
from meshwright.plan.event_loop import EventLoop
from meshwright.plan.step.program import Action

RunsNeeded = Mapping[Dependency, np.ndarray]  # of each F and I (or B): int32 [ranks], by rank


def find_runs_needed(schedule: Schedule) -> RunsNeeded:
    """Returns how many runs of each rank must have ended before each run of `schedule` has ended."""
    needed: dict[Dependency, np.ndarray] = {}
    last = np.zeros((schedule.num_ranks, schedule.num_ranks), dtype=np.int32)
    cursors = [0] * schedule.num_ranks
    loop = EventLoop[Dependency](schedule.num_ranks)

    def run_list(rank: int, _: float) -> None:
        for action in islice(schedule.actions[rank], cursors[rank], None):
            dependencies = schedule.dependencies_of(action)
            if loop.arrival(dependencies, rank) is None:
                return
            for dependency in dependencies:
                np.maximum(last[rank], needed[dependency], out=last[rank])
            cursors[rank] += 1
            last[rank, rank] = cursors[rank]
            output = schedule.output_of(action)
            if output is not None:
                needed[output] = last[rank].copy()
                loop.happen(output, 0.0, rank)

    loop.run(run_list)
    return needed


def post_receives_early(
    actions: Sequence[Action], run_starts: Set[tuple[str, str]], runs_needed: Mapping[str, int]
) -> Iterator[Action]:
    """Yields `actions` with each receive before the run that precedes its own, unless it depends on that run.

    A run starts at an action whose kind and subject are in `run_starts`. `runs_needed` says, by name of a
    receive, how many of them must have ended before its message is sent. Receives stay in their order.
    """
    runs: list[list[Action]] = [[]]
    posted_early: list[list[Action]] = [[]]
    microbatches: list[int | None] = [None]
    is_held = True  # by a receive that could not be posted early, or because no run has started
    for action in actions:
        if (action.kind, action.subject) in run_starts:
            runs.append([])
            posted_early.append([])
            microbatches.append(action.microbatch)
            is_held = False
        elif action.stream == "recv":
            # the run adds up gradients of the same values
            adds_up = action.kind == "RECV_GRAD" and action.microbatch == microbatches[-1]
            is_held = is_held or adds_up or runs_needed[action.name] > len(runs) - 2
            if not is_held:
                posted_early[-1].append(action)
                continue
        runs[-1].append(action)
    for early, run in zip(posted_early, runs, strict=True):
        yield from early
        yield from run
