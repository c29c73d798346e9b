"""Automatic schedules: the one with the least bubble for uneven stages, within the memory of each rank.

Why it works: the named schedules are right for stages that all take the same time. The head, a long stage, a
slow link or a rank with little memory change the best schedule; but any schedule can be simulated in
milliseconds. So all of them are: the named ones, each with W placed anew, those of the list scheduler under
many rules, and random changes of the best of these, within a budget.

    named schedules ---+--> split, W into the gaps --+
                       |                             +--> the best that fits --> move actions into gaps -->
                                                     result
    rules -------------+--> list scheduler ----------+        ^______________________|  `num_trials` times

    bubble = 1 - work of the busiest rank / time of the step         (what no schedule can avoid is not in it)

Guaranteed: the result is never longer than the best named schedule that fits, holds at most the limit on
every rank, is deterministic, and exists whenever any schedule fits: one microbatch at a time needs the
least memory, and the list scheduler falls back on that. The optimum over all schedules is not guaranteed (a
job-shop problem); on two ranks with up to three microbatches, where all schedules can be tried, it was
found. The work of the busiest rank bounds the distance to it. In a plan the times are the operations of its
stages, all ranks wait for each other at the end, and two stages per rank are V-shaped.
Cost: seconds while planning, none in the run: some 60 schedules (120 with several stages per rank) and
`num_trials` more are built and simulated, about 10 microseconds per action each.
Limits: one virtual stage per stage (DualPipe keeps two copies of the weights and is not among the named ones
here); times that change from step to step are not followed.
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (section 3: automatic
scheduling).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import inf
from random import Random

from meshwright.parallel.pipeline.schedules import gpipe, interleaved, naive_model_parallel, one_f_one_b
from meshwright.parallel.pipeline.schedules.dualpipe import dualpipev_schedule
from meshwright.parallel.pipeline.schedules.list_scheduler import (
    ROUNDING,
    PriorityRule,
    fill_bubbles,
    fits_memory,
    greedy_schedule,
    longest_rank_time,
    split_backwards,
)
from meshwright.parallel.pipeline.schedules.schedule import (
    PIPELINE_KEY,
    Schedule,
    ScheduleDeadlock,
    ScheduleTimeline,
    StageCosts,
    VirtualStage,
    check_counts,
    simulate,
)
from meshwright.parallel.pipeline.schedules.zb_v import (
    v_shaped_placement,
    zb_v_half_schedule,
    zb_v_min_schedule,
    zb_v_schedule,
)
from meshwright.parallel.pipeline.schedules.zero_bubble import zb_h1_schedule, zb_h2_schedule
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics

TimelineMeasure = Callable[[ScheduleTimeline], float]
FORWARDS_IN_FLIGHT = (2 / 3, 1.0, 1.5, 2.0, 3.0, inf)  # for one stage per rank; for more, that much less
PATIENCE = (0.0, 0.5, 1.0)
KIND_PRIORITIES = ("IFW", "IWF", "FIW")


def automatic_schedule(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int, costs: StageCosts
) -> Schedule:
    """Returns the best schedule found if all ranks wait for each other at the end; two stages per rank are
    V-shaped.
    """
    stages = (
        v_shaped_placement(num_ranks)
        if num_virtual_stages == 2
        else tuple(VirtualStage(stage % num_ranks, stage) for stage in range(num_ranks * num_virtual_stages))
    )
    return search_schedule(
        num_ranks, num_microbatches, costs, measure=lambda timeline: timeline.end, virtual_stages=stages
    ).schedule


def search_schedule(
    num_ranks: int,
    num_microbatches: int,
    costs: StageCosts,
    limits: Sequence[float] = (),
    *,
    measure: TimelineMeasure = longest_rank_time,
    num_trials: int = 200,
    virtual_stages: tuple[VirtualStage, ...] = (),
) -> ScheduleTimeline:
    """Returns the timeline of the best schedule found for these costs, of `num_ranks` stages or a multiple.

    Args:
        limits: memory of each rank, in the unit of `costs.activation_memory`; empty: unlimited.
        measure: what is minimized: `longest_rank_time` if ranks step one by one, `ScheduleTimeline.end` if
            they wait.
        num_trials: random changes of the best schedule.
        virtual_stages: the placement of stages; empty: the best one.

    Raises:
        PlanError: the counts do not match, or one microbatch does not fit; with the smallest limits that do.
    """
    raise_diagnostics(check_search(num_ranks, num_microbatches, costs, limits))
    memory_limits = list(limits) or [inf] * num_ranks
    best: ScheduleTimeline | None = None
    for candidate in _candidates(num_ranks, num_microbatches, costs, memory_limits):
        if virtual_stages and candidate.virtual_stages != virtual_stages:
            continue
        found = simulate(candidate, costs)
        if fits_memory(found, memory_limits) and (best is None or measure(found) < measure(best)):
            best = found
    if best is None:
        raise RuntimeError(
            "no rule fits: the list scheduler runs one microbatch at a time when memory is short, so one must"
        )
    return _improve(best, costs, memory_limits, measure, num_trials)


def named_schedules(num_ranks: int, num_microbatches: int, num_stages: int) -> Iterator[tuple[str, Schedule]]:
    """Yields the named schedules for that many stages, a multiple of the ranks, one virtual stage each."""
    if num_stages == num_ranks:
        yield (
            "naive_model_parallel",
            naive_model_parallel.naive_model_parallel_schedule(num_ranks, num_microbatches),
        )
        yield "gpipe", gpipe.gpipe_schedule(num_ranks, num_microbatches)
        yield "one_f_one_b", one_f_one_b.one_f_one_b_schedule(num_ranks, num_microbatches)
        yield "h1", zb_h1_schedule(num_ranks, num_microbatches)
        yield "h2", zb_h2_schedule(num_ranks, num_microbatches)
        return
    yield (
        "interleaved",
        interleaved.interleaved_schedule(num_ranks, num_microbatches, num_stages // num_ranks),
    )
    if num_stages == 2 * num_ranks:
        yield "v", zb_v_schedule(num_ranks, num_microbatches)
        yield "v_half", zb_v_half_schedule(num_ranks, num_microbatches)
        yield "v_min", zb_v_min_schedule(num_ranks, num_microbatches)
        yield "dualpipev", dualpipev_schedule(num_ranks, num_microbatches)


def check_search(
    num_ranks: int, num_microbatches: int, costs: StageCosts, limits: Sequence[float] = ()
) -> Iterator[Diagnostic]:
    """Yields why no schedule can be found."""
    stages = len(costs.forward)
    counts = list(check_counts(num_ranks, num_microbatches))
    yield from counts
    if counts:
        return
    if stages == 0 or stages % num_ranks:
        text = f"costs of {stages} stages on {num_ranks} ranks; needed is the same number of stages on each"
        yield Diagnostic(
            text, f"cut the model into {max(1, round(stages / num_ranks)) * num_ranks} stages", PIPELINE_KEY
        )
    elif limits and (len(limits) != num_ranks or not costs.activation_memory):
        text = (
            f"{len(limits)} limits for {num_ranks} ranks, and activation_memory is "
            f"{'given' if costs.activation_memory else 'not given'}"
        )
        yield Diagnostic(text, "give a limit per rank, and costs.activation_memory per stage", PIPELINE_KEY)
    elif limits:
        least = [_min_memory(num_ranks, placed, costs) for placed in _placements(num_ranks, stages)]
        if not any(_covers(limits, each) for each in least):
            fewest = min(
                least,
                key=lambda each: sum(
                    max(0.0, need - limit) for need, limit in zip(each, limits, strict=True)
                ),
            )
            rank = next(rank for rank in range(num_ranks) if limits[rank] * (1 + ROUNDING) < fewest[rank])
            text = (
                f"rank {rank} may hold {limits[rank]:g}, and one microbatch of its stages holds "
                f"{fewest[rank]:g}"
            )
            smallest = ", ".join(f"{need:g}" for need in fewest)
            yield Diagnostic(
                text,
                f"the smallest limits that work are {smallest}; or cut the model elsewhere",
                PIPELINE_KEY,
            )


def _placements(ranks: int, stages: int) -> Iterator[tuple[VirtualStage, ...]]:
    yield tuple(VirtualStage(stage % ranks, stage) for stage in range(stages))
    if stages == 2 * ranks:
        yield v_shaped_placement(ranks)


def _min_memory(ranks: int, stages: Sequence[VirtualStage], costs: StageCosts) -> list[float]:
    return [
        sum(costs.activation_memory[stage.stage] for stage in stages if stage.pp_rank == rank)
        for rank in range(ranks)
    ]


def _covers(limits: Sequence[float], least: Sequence[float]) -> bool:
    return all(limit * (1 + ROUNDING) >= need for limit, need in zip(limits, least, strict=True))


def _candidates(
    ranks: int, num_microbatches: int, costs: StageCosts, memory_limits: Sequence[float]
) -> Iterator[Schedule]:
    num_stages = len(costs.forward)
    for _, schedule in named_schedules(ranks, num_microbatches, num_stages):
        yield schedule
        yield from (
            fill_bubbles(split_backwards(schedule), costs, memory_limits, patience) for patience in (0.5, 1.0)
        )
    for stages in _placements(ranks, num_stages):
        if memory_limits[0] == inf or _covers(memory_limits, _min_memory(ranks, stages, costs)):
            yield from (
                greedy_schedule(stages, num_microbatches, costs, rule, memory_limits)
                for rule in _rules(num_stages // ranks)
            )


def _rules(num_virtual_stages: int) -> Iterator[PriorityRule]:
    for deep in (True, False)[: min(num_virtual_stages, 2)]:
        for kinds in KIND_PRIORITIES:
            yield from (
                PriorityRule(kinds, ahead / num_virtual_stages, patience, deep)
                for ahead in FORWARDS_IN_FLIGHT
                for patience in PATIENCE
            )


def _improve(
    best: ScheduleTimeline,
    costs: StageCosts,
    memory_limits: Sequence[float],
    measure: TimelineMeasure,
    trials: int,
) -> ScheduleTimeline:
    random = Random(0)
    bound = max(map(best.busy_time, range(best.schedule.num_ranks)))
    for _ in range(trials):
        if measure(best) <= bound * (1 + ROUNDING):
            break
        try:
            found = simulate(_move_action(best, random), costs)
        except ScheduleDeadlock:
            continue
        if fits_memory(found, memory_limits) and measure(found) <= measure(best):
            best = found
    return best


def _move_action(timeline: ScheduleTimeline, random: Random) -> Schedule:
    schedule = timeline.schedule
    rank = random.choice([rank for rank, actions in enumerate(schedule.actions) if len(actions) > 1] or [0])
    actions, spans = list(schedule.actions[rank]), timeline.spans[rank]
    gaps = [at for at in range(1, len(actions)) if spans[at][0] > spans[at - 1][1] * (1 + ROUNDING)]
    to = random.choice(gaps) if gaps and random.random() < 0.7 else random.randrange(max(1, len(actions) - 1))
    later = min(to + 1 + int(random.expovariate(0.3)), len(actions) - 1)
    actions.insert(to, actions.pop(later))
    return Schedule(
        schedule.virtual_stages,
        tuple(chain(schedule.actions[:rank], [tuple(actions)], schedule.actions[rank + 1 :])),
    )
