"""DualPipe: microbatches enter from both ends, so forwards and backwards hide each other's messages.

Why it works: half of the microbatches enter at rank 0 and go up, half enter at the last rank and go down.
So every rank has two stages of the model, one per direction, and in the steady state always a forward of one
and a backward of the other: messages of one (of experts, of tensors) travel while the other computes. The
way to the first gradient is half as long for every rank. DualPipeV is the same cut in half: ranks k and p -
1 - k of DualPipe do the same, so one is left out and the other has both stages, with one copy of the
weights.

    p = 4, m = 8   rank 0   F0  F1  F2  F0' I0' W0' F1' F3  B1' F2' B0  ...   0 .. 3 up, 0' .. 3' back
                   rank 1   F0  F0' F1  F1' F2  B0' F2' B0  F3  B1' F3' ...   B: I and W in one
                   rank 2   F0' F0  F1' F1  F2' B0  F2  B0' F3' B1  F3  ...   adjacent F and B may run as one
                   rank 3   F0' F1' F2' F0  I0  W0  F1  F3' B1  F2  B0' ...

    ranks that turn round: h = p / 2 (DualPipe, F, I and W of a stage), h = p (DualPipeV, one of two)
    idle time = (h - 1) (FB + I + W - 3 W)    if a pair is one action of FB = F + I + W (F <= I)
              = (h - 1) (F + I - W)           if B runs behind F, as simulated here (W <= I <= F <= I + W)
    held by a rank = p + 1 microbatches of a stage (DualPipe), 2 p + 1 of one of two (DualPipeV)

Any number of microbatches works (2 or more, one per direction): the lists are those of at least p (2 p) per
direction, and surplus microbatches are left out.
Cost: DualPipe keeps the weights twice, and sums the gradients of both copies: S bytes per rank and step for
S bytes of weights on it, after all backwards. Messages between stages as 1F1B (DualPipe), twice (DualPipeV).
Limits: DualPipe needs an even number of ranks. It is worth its weights if messages inside a stage are long.
Paper: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437 (section 3.2.1); the repository
DualPipe, 2025.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from meshwright.parallel.pipeline.schedules.schedule import (
    Schedule,
    ScheduleAction,
    VirtualStage,
    check_counts,
)
from meshwright.parallel.pipeline.schedules.zb_v import StagePass, repeat_passes, v_shaped_placement
from meshwright.plan.job.errors import Diagnostic, raise_diagnostics

OLDEST_PENDING_W = -1  # in place of a stage: the W that waits longest


def dualpipe_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule DualPipe. Virtual stage k is stage k on rank k (up), p + k is stage p - 1 - k on
    rank k (down).

    The first half of the microbatches goes up, one more if they are odd.

    Raises:
        PlanError: the number of ranks is odd.
    """
    raise_diagnostics(check_dualpipe(num_ranks, num_microbatches))
    up, half, each = (num_microbatches + 1) // 2, num_ranks // 2, max((num_microbatches + 1) // 2, num_ranks)

    def rank_actions(rank: int) -> Iterator[ScheduleAction]:
        early, late = (rank, num_ranks + rank) if rank < half else (num_ranks + rank, rank)
        for kind, stage, microbatch in _number_microbatches(
            _rank_passes(early, late, half, min(rank, num_ranks - 1 - rank), each)
        ):
            upwards = stage < num_ranks
            if microbatch < (up if upwards else num_microbatches - up):
                yield ScheduleAction(kind, stage, microbatch if upwards else up + microbatch)

    stages = [VirtualStage(rank, rank) for rank in range(num_ranks)] + [
        VirtualStage(rank, num_ranks - 1 - rank) for rank in range(num_ranks)
    ]
    return Schedule(tuple(stages), tuple(tuple(rank_actions(rank)) for rank in range(num_ranks)))


def dualpipev_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Returns the schedule DualPipeV: stage k on rank k, and on rank 2 p - 1 - k after the turn."""
    raise_diagnostics(check_counts(num_ranks, num_microbatches))
    each = max(num_microbatches, 2 * num_ranks)
    lists = (
        _number_microbatches(_rank_passes(rank, 2 * num_ranks - 1 - rank, num_ranks, rank, each))
        for rank in range(num_ranks)
    )
    return Schedule(
        v_shaped_placement(num_ranks),
        tuple(
            tuple(action for action in actions if action.microbatch < num_microbatches) for actions in lists
        ),
    )


def check_dualpipe(num_ranks: int, num_microbatches: int) -> Iterator[Diagnostic]:
    """Yields why these counts cannot work for DualPipe; DualPipeV takes any."""
    yield from check_counts(num_ranks, num_microbatches)
    if num_ranks > 0 and num_ranks % 2:
        text = f"{num_ranks} ranks; DualPipe needs an even number of ranks"
        near = f"{num_ranks - 1} or {num_ranks + 1}" if num_ranks > 1 else "2"
        yield Diagnostic(text, f"use {near} ranks, or dualpipev, which takes any number", "mesh.pp")


def _rank_passes(early: int, late: int, half: int, near: int, num_microbatches: int) -> Iterator[StagePass]:
    far = half - 1 - near
    weights: StagePass = ("W", OLDEST_PENDING_W)
    yield from repeat_passes(2 * far, ("F", early))
    yield from repeat_passes(near + 1, ("F", early), ("F", late))
    yield from repeat_passes(far, ("I", late), weights, ("F", late))
    yield from repeat_passes(
        num_microbatches - half - far, ("F", early), ("B", late), ("F", late), ("B", early)
    )
    yield from repeat_passes(far, ("B", late), ("F", late), ("B", early))
    for at in range(2 * (near + 1)):  # from the middle on W waits, to fill what follows
        yield "I" if at > near else "B", early if at % 2 else late
    yield from repeat_passes(far, weights, ("I", early))
    yield from repeat_passes(near + 1, weights)


def _number_microbatches(passes: Iterable[StagePass]) -> Iterator[ScheduleAction]:
    done: Counter[tuple[bool, int]] = Counter()
    owed: deque[ScheduleAction] = deque()
    for kind, stage in passes:
        if kind == "W":
            yield owed.popleft()
            continue
        key = kind == "F", stage
        yield ScheduleAction(kind, stage, done[key])
        if kind == "I":
            owed.append(ScheduleAction("W", stage, done[key]))
        done[key] += 1
