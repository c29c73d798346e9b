"""DualPipe: micro-batches from both ends at once, so that a forward and a backward can run as one and hide each other's messages.

Why it works: half of the micro-batches enter at rank 0 and go up, half enter at the last rank and go down. So every rank has two
parts of the model, one of each direction, and once it is under way a forward of the one and a backward of the other at any time:
messages of the one (of experts, of tensors) travel while the other computes. The way to the first gradient is half as long for
everybody. DualPipeV is the same cut in half: ranks k and p - 1 - k of DualPipe do the same, so one is left out and the other has
both parts, with one copy of the weights.

    p = 4, m = 8    rank 0   F0  F1  F2  F0' I0' W0' F1' F3  B1' F2' B0  ...     0 .. 3 go up, 0' .. 3' (4 .. 7) go down
                    rank 1   F0  F0' F1  F1' F2  B0' F2' B0  F3  B1' F3' ...     B: I and W in one
                    rank 2   F0' F0  F1' F1  F2' B0  F2  B0' F3' B1  F3  ...     F and B side by side may run as one
                    rank 3   F0' F1' F2' F0  I0  W0  F1  F3' B1  F2  B0' ...

    ranks that turn round: h = p / 2 (DualPipe, F, I and W of a part), h = p (DualPipeV, of one of two parts)
    idle time = (h - 1) (FB + I + W - 3 W)    where a pair is one act of FB = F + I + W and both end together (F <= I)
              = (h - 1) (F + I - W)           where B is played behind F, as on paper here (W <= I <= F <= I + W)
    held by a rank = p + 1 micro-batches of a part (DualPipe), 2 p + 1 of one of two (DualPipeV)

Any number of micro-batches works (of 2 or more, one per direction): the lists are those of at least p (2 p) per direction, and
what is too much is left out.
Cost: DualPipe keeps the weights twice, and sums the gradients of both copies: S bytes per rank and step for S bytes of weights on
it, when all backwards are over. Messages between parts as 1F1B (DualPipe), twice (DualPipeV).
Limits: DualPipe needs an even number of ranks. It is worth its weights where messages inside a part are long.
Paper: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437 (section 3.2.1); the repository DualPipe, 2025.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from meshwright.parallel.pipeline.schedules.schedule import Order, Slot, Stage, count_faults
from meshwright.parallel.pipeline.schedules.zb_v import Act, folded, times
from meshwright.plan.job.errors import Fault, raise_faults

OWED = -1  # in place of a stage: the W that waits longest


def dualpipe(ranks: int, micros: int) -> Order:
    """The lists of DualPipe: stage k is part k on rank k, going up, stage p + k is part p - 1 - k on rank k, going down.

    The first half of the micro-batches goes up; if they are odd, one more does. Raises PlanError for an odd number of ranks.
    """
    raise_faults(faults(ranks, micros))
    up, half, each = (micros + 1) // 2, ranks // 2, max((micros + 1) // 2, ranks)

    def slots(rank: int) -> Iterator[Slot]:
        early, late = (rank, ranks + rank) if rank < half else (ranks + rank, rank)
        for kind, stage, micro in _numbered(_acts(early, late, half, min(rank, ranks - 1 - rank), each)):
            upwards = stage < ranks
            if micro < (up if upwards else micros - up):
                yield Slot(kind, stage, micro if upwards else up + micro)

    stages = [Stage(rank, rank) for rank in range(ranks)] + [Stage(rank, ranks - 1 - rank) for rank in range(ranks)]
    return Order(tuple(stages), tuple(tuple(slots(rank)) for rank in range(ranks)))


def dualpipev(ranks: int, micros: int) -> Order:
    """The lists of DualPipeV: part k on rank k, and on rank 2 p - 1 - k after the turn."""
    raise_faults(count_faults(ranks, micros))
    each = max(micros, 2 * ranks)
    lists = (_numbered(_acts(rank, 2 * ranks - 1 - rank, ranks, rank, each)) for rank in range(ranks))
    return Order(folded(ranks), tuple(tuple(slot for slot in slots if slot.micro < micros) for slots in lists))


def faults(ranks: int, micros: int) -> Iterator[Fault]:
    """Why these counts cannot work for DualPipe; DualPipeV takes any."""
    yield from count_faults(ranks, micros)
    if ranks > 0 and ranks % 2:
        text = f"{ranks} ranks; both directions must meet between two of them, so their number is even"
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        yield Fault(text, f"use {near} ranks, or dualpipev, which takes any number", "mesh.pp")


def _acts(early: int, late: int, half: int, near: int, micros: int) -> Iterator[Act]:
    """(kind, stage) of the rank that is `near` ranks from where its `early` stage begins; W is the oldest that is owed.

    Each stage takes `micros` micro-batches, at least 2 `half`.
    """
    far = half - 1 - near
    weights: Act = ("W", OWED)
    yield from times(2 * far, ("F", early))
    yield from times(near + 1, ("F", early), ("F", late))
    yield from times(far, ("I", late), weights, ("F", late))
    yield from times(micros - half - far, ("F", early), ("B", late), ("F", late), ("B", early))
    yield from times(far, ("B", late), ("F", late), ("B", early))
    for at in range(2 * (near + 1)):  # from the middle on W waits, to fill what follows
        yield "I" if at > near else "B", early if at % 2 else late
    yield from times(far, weights, ("I", early))
    yield from times(near + 1, weights)


def _numbered(acts: Iterable[Act]) -> Iterator[Slot]:
    """The slots of `acts`: the k-th forward and the k-th backward of a stage are those of its micro-batch k."""
    done: Counter[tuple[bool, int]] = Counter()
    owed: deque[Slot] = deque()
    for kind, stage in acts:
        if kind == "W":
            yield owed.popleft()
            continue
        key = kind == "F", stage
        yield Slot(kind, stage, done[key])
        if kind == "I":
            owed.append(Slot("W", stage, done[key]))
        done[key] += 1
