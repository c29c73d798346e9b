"""Zero-bubble pipelines: the backward is split into input and weight gradients; the latter fill the bubble.

Why it works: the rank before needs the input gradient (I) at once; only the optimizer needs the weight
gradient (W). So W stands where a rank would be idle. H1 keeps the memory of 1F1B and delays W so far that
the last ranks hold as many microbatches as the first; H2 also begins with more forwards, enough to fill the
way there and back, and if F = I = W no rank is idle between its first and its last action. 2p is made by
list scheduling for given times (list_scheduler.py), within twice the memory of 1F1B.

    H1, p = 3   rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1    ...      after I of k, W of k - r and the next F
                rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 ...      p - r forwards ahead
                rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...
    H2, p = 3   rank 0   F0 F1 F2 F3 F4 I0 W0 F5 ...               after I of k, W of k - 2 r
                rank 1   .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 ...
                rank 2   .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 ...

    idle time of a rank between its first and last action: (p - 1) (F + I - W) (H1),
    (p - 1) (F + I - 2 W) (H2), about 0 (2p)
    held by the fullest rank = p microbatches (H1), 2 p - 1 (H2), at most 2 p (2p); needs W <= F and W <= I

Later ranks begin and end later: H2 and 2p have no bubble if each rank steps when its own work is done. If a
step waits for all ranks, as for a norm over all gradients, it takes longer, with F = I = W by (p - 1) F, and
H1 is then as short. Any number of microbatches works; below p (H1) and 2 p - 1 (H2) the lists have fewer
forwards ahead.
Cost: all that a forward saves is held until W, and from I on the output gradients of layers, in a Llama
block 0.6 of what it saves; a split backward launches more kernels. Bytes are those of 1F1B; sharded weights
are gathered for W too.
Limits: 2p needs about 3 p microbatches and known times; stages whose I and W cannot be separated gain
nothing. Weights of a Python autograd function, such as colwise layers along tp, have their gradients in I.
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (sections 2 and 3, tables 1 and
2).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.parallel.pipeline.schedules.list_scheduler import (
    PriorityRule,
    fill_bubbles,
    fits_memory,
    greedy_schedule,
    longest_rank_time,
)
from meshwright.parallel.pipeline.schedules.schedule import (
    Schedule,
    ScheduleAction,
    StageCosts,
    check_counts,
    simulate,
)
from meshwright.plan.job.errors import raise_diagnostics

PRIORITY_RULES = tuple(
    PriorityRule(kinds, ahead, patience)
    for kinds in ("IFW", "FIW")
    for ahead in (1.0, 2.0, 3.0)
    for patience in (0.0, 0.5, 1.0)
)


def zb_h1_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule ZB-H1: the memory of 1F1B, about a third of its bubble."""
    return _build_handcrafted(num_ranks, num_microbatches, lambda rank: num_ranks - rank, lambda rank: rank)


def zb_h2_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule ZB-H2: twice the memory of 1F1B, no bubble if all passes take the same time."""
    return _build_handcrafted(
        num_ranks, num_microbatches, lambda rank: 2 * (num_ranks - rank) - 1, lambda rank: 2 * rank
    )


def zb_2p_schedule(num_ranks: int, num_microbatches: int, costs: StageCosts) -> Schedule:
    """Returns the schedule ZB-2p for these costs: no rank holds more than 2 `num_ranks` microbatches of its
    stage.
    """
    return zb_schedule_within_memory(num_ranks, num_microbatches, costs, 2 * num_ranks)


def zb_schedule_within_memory(
    num_ranks: int, num_microbatches: int, costs: StageCosts, max_microbatches: int
) -> Schedule:
    """Returns the shortest schedule for these costs, of those of `PRIORITY_RULES`, H1 and H2.

    No rank holds more than `max_microbatches` microbatches of its stage; ZB-1p has `num_ranks`. Without
    `costs.activation_memory`, a microbatch holds one unit until W.
    """
    raise_diagnostics(check_counts(num_ranks, num_microbatches))
    if not costs.activation_memory:
        costs = replace(costs, activation_memory=[1.0] * num_ranks, weight_grad_memory=[1.0] * num_ranks)
    limits = [max_microbatches * held for held in costs.activation_memory]
    hand = [zb_h1_schedule(num_ranks, num_microbatches), zb_h2_schedule(num_ranks, num_microbatches)]
    made = [
        greedy_schedule(hand[0].virtual_stages, num_microbatches, costs, rule, limits)
        for rule in PRIORITY_RULES
    ]
    timed = [
        simulate(schedule, costs)
        for schedule in (*hand, *(fill_bubbles(schedule, costs, limits) for schedule in hand), *made)
    ]
    return min(
        (timeline for timeline in timed if fits_memory(timeline, limits)), key=longest_rank_time
    ).schedule


def _build_handcrafted(
    ranks: int, num_microbatches: int, ahead: Callable[[int], int], late: Callable[[int], int]
) -> Schedule:
    raise_diagnostics(check_counts(ranks, num_microbatches))
    return Schedule.with_looped_placement(
        _rank_actions(
            rank, min(ahead(rank), num_microbatches), min(late(rank), num_microbatches), num_microbatches
        )
        for rank in range(ranks)
    )


def _rank_actions(rank: int, ahead: int, late: int, num_microbatches: int) -> Iterator[ScheduleAction]:
    yield from (ScheduleAction("F", rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(num_microbatches):
        yield ScheduleAction("I", rank, microbatch)
        if microbatch >= late:
            yield ScheduleAction("W", rank, microbatch - late)
        if microbatch + ahead < num_microbatches:
            yield ScheduleAction("F", rank, microbatch + ahead)
    yield from (
        ScheduleAction("W", rank, microbatch)
        for microbatch in range(num_microbatches - late, num_microbatches)
    )
