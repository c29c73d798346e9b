"""V-shaped zero-bubble pipelines: each rank has two stages, one down and one back; W fills gaps.

Why it works: stage k lies on rank k for k < p, and on rank 2 p - 1 - k after the turn. A rank that keeps a
microbatch long in one stage keeps it briefly in the other, so all ranks hold the same; and the loss is
computed on the rank that began, which has work until then. Three schedules differ in how long a microbatch
is in flight, and so in memory.

    p = 3, lower case is the second stage (5, 4, 3 on ranks 0, 1, 2)
    v       rank 0   F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 F5 I0 W0 f3 i3 w3 ...
            rank 1   .. F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 ...
            rank 2   .. .. F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 ...
    half,   every 6 actions each rank runs each of F f i I for the next microbatch, and W in the other two;
    min     a microbatch goes from rank to rank by 1, 2, 1, 2 actions on its four ways (half), 1, 1, 1, 1
            (min)

    idle time of a rank, between its first and last action, F, I and W those of a rank with both stages:
        v     = (p - 1) (F - W)          if F = I >= W: none if all take the same time
        half <= (p - 1) (F + I + W) / 2  if F = I = W: half of that of 1F1B
        min  <= (p - 1) (F + I + W) 2/3
    held by a rank, in microbatches = p (v), floor(p / 2) + 1 (half), ceil((p + 2) / 3) (min); 1F1B: p

In `half` and `min` the lists are those of the pattern, with W moved to where ranks would be idle if all
actions took the same time (list_scheduler.py). Any number of microbatches works: few leave actions out.
Cost: twice the messages of 1F1B. The first and the last stage lie on one rank, so tied weights need no sum.
Limits: the blocks are split into 2 p stages; with uneven times `half` and `min` idle more (automatic.py finds
better schedules).
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (section 6, ZB-V); Qi et al.
2024, "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 (section 3: V-Min, V-Half, ZB-V).
"""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from meshwright.parallel.pipeline.schedules.list_scheduler import fill_bubbles
from meshwright.parallel.pipeline.schedules.schedule import (
    PassKind,
    Schedule,
    ScheduleAction,
    StageCosts,
    VirtualStage,
    check_counts,
    simulate,
)
from meshwright.plan.job.errors import raise_diagnostics

ACTIONS_PER_MICROBATCH = 6  # slots of a rank per microbatch: F, I and W of two stages
StagePass = tuple[PassKind, int]  # and the stage, or the stage


class VSchedulePattern(NamedTuple):
    """The actions a microbatch takes from rank to rank on its four ways, and its waits before the last
    three.

    The ways are: F down and back, I down and back.
    """

    steps: tuple[int, int, int, int]
    waits: tuple[int, int, int]


def v_shaped_placement(num_ranks: int) -> tuple[VirtualStage, ...]:
    """Returns two stages per rank, on the way down and back."""
    return tuple(VirtualStage(min(stage, 2 * num_ranks - 1 - stage), stage) for stage in range(2 * num_ranks))


def zb_v_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule ZB-V: the memory of 1F1B on every rank, no bubble if all passes take the same
    time.
    """
    raise_diagnostics(check_counts(num_ranks, num_microbatches))
    return Schedule(
        v_shaped_placement(num_ranks),
        tuple(
            _first_microbatches(
                _rank_passes(rank, num_ranks, max(num_microbatches, 2 * num_ranks - 1)), num_microbatches
            )
            for rank in range(num_ranks)
        ),
    )


def zb_v_half_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule V-Half: about half the memory and half the bubble of 1F1B."""
    return _repeat_pattern(
        num_ranks, num_microbatches, VSchedulePattern((1, 2, 1, 2), (1, 0, 0) if num_ranks % 2 else (3, 0, 4))
    )


def zb_v_min_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule V-Min: about a third of the memory and two thirds of the bubble of 1F1B."""
    return _repeat_pattern(
        num_ranks, num_microbatches, VSchedulePattern((1, 1, 1, 1), (0, 0, 0) if num_ranks % 3 else (2, 0, 2))
    )


def repeat_passes(count: int, *passes: StagePass) -> tuple[StagePass, ...]:
    """Returns these passes, `count` times."""
    return passes * count


def _rank_passes(rank: int, ranks: int, num_microbatches: int) -> Iterator[StagePass]:
    down, back = rank, 2 * ranks - 1 - rank
    gradient: tuple[StagePass, ...] = (("F", back), ("I", back), ("W", back))
    ahead = 2 * (ranks - rank) - 1 + rank  # forwards down before the first gradient
    yield from repeat_passes(ahead - rank, ("F", down))
    yield from repeat_passes(rank, ("F", back), ("F", down))
    yield from repeat_passes(ranks - rank, *gradient)
    for microbatch in range(num_microbatches - ranks):
        if microbatch < num_microbatches - ahead:
            yield "F", down
        yield from (("I", down), ("W", down), *gradient)
    yield from repeat_passes(rank, ("I", down), ("I", back))
    yield from repeat_passes(ranks - rank, ("I", down), ("W", down))
    yield from repeat_passes(rank, ("W", back))
    yield from repeat_passes(rank, ("W", down))


def _first_microbatches(passes: Iterator[StagePass], num_microbatches: int) -> tuple[ScheduleAction, ...]:
    done: dict[StagePass, int] = {}
    actions = []
    for stage_pass in passes:
        microbatch = done[stage_pass] = done.get(stage_pass, -1) + 1
        if microbatch < num_microbatches:
            actions.append(ScheduleAction(*stage_pass, microbatch))
    return tuple(actions)


def _repeat_pattern(ranks: int, num_microbatches: int, pattern: VSchedulePattern) -> Schedule:
    raise_diagnostics(check_counts(ranks, num_microbatches))
    lists = []
    for rank in range(ranks):
        begins = _begin_times(rank, ranks, pattern)
        timed_actions = sorted(
            (begin + microbatch * ACTIONS_PER_MICROBATCH, *stage_pass, microbatch)
            for stage_pass, begin in begins.items()
            for microbatch in range(num_microbatches)
        )
        lists.append(
            tuple(ScheduleAction(kind, stage, microbatch) for _, kind, stage, microbatch in timed_actions)
        )
    schedule, costs = Schedule(v_shaped_placement(ranks), tuple(lists)), StageCosts.uniform(2 * ranks)
    return fill_bubbles(schedule, costs, simulate(schedule, costs).peak_memory)


def _begin_times(rank: int, ranks: int, pattern: VSchedulePattern) -> dict[StagePass, int]:
    down, back, others = rank, 2 * ranks - 1 - rank, ranks - 1
    turn = others * pattern.steps[0] + 1 + pattern.waits[0]
    end = turn + others * pattern.steps[1]  # the last stage, on rank 0
    begin = end + 1 + pattern.waits[1]
    again = begin + others * pattern.steps[2] + 1 + pattern.waits[2]
    begins: dict[StagePass, int] = {
        ("F", down): rank * pattern.steps[0],
        ("F", back): turn + (others - rank) * pattern.steps[1],
        ("I", back): begin + rank * pattern.steps[2],
        ("I", down): again + (others - rank) * pattern.steps[3],
    }
    free = [
        action
        for action in range(ACTIONS_PER_MICROBATCH)
        if action not in {each % ACTIONS_PER_MICROBATCH for each in begins.values()}
    ]
    gradients = (begins["I", down], begins["I", back])
    soonest = min((_next_free_times(gradients, actions) for actions in permutations(free, 2)), key=sum)
    return {**begins, ("W", down): soonest[0], ("W", back): soonest[1]}


def _next_free_times(begins: Sequence[int], actions: Sequence[int]) -> list[int]:
    return [
        begin + 1 + (action - begin - 1) % ACTIONS_PER_MICROBATCH
        for begin, action in zip(begins, actions, strict=True)
    ]
