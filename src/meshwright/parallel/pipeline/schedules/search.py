"""The order with the least bubble for parts that are not alike, within the memory of each rank.

Why it works: the schedules with names are right for parts that all take the same time. The head, a long part, a slow link or a
rank with little memory bend the best order, and nobody finds it by hand; but any list can be played on paper in milliseconds. So
all of them are played: the named ones, each with W placed anew, those that a clock makes by many rules (greedy.py), and the best
of these, changed a little, as often as the budget says.

    named orders --+--> split, W into the gaps --+
                   |                             +--> the best that fits --> move slots into its gaps --> the answer
    rules ---------+--> the clock's orders ------+        ^______________________|  `trials` times

    bubble = 1 - work of the busiest rank / time of the step         (what no order can avoid is not in it)

What is guaranteed: the answer is never longer than the best named order that fits, holds at most the limit on every rank, is the
same whenever it is asked for, and exists whenever any order fits: one micro-batch at a time needs the least memory, and the
clock falls back on that. That it is the least of all orders is not guaranteed (a job-shop problem); on two ranks with up to three
micro-batches, where all orders can be tried, it was. How far it may be from it, the work of the busiest rank tells.
In a plan the times are the operations of its parts, all ranks wait for each other in the end, and two parts per rank are folded.
Cost: seconds on paper, none in the run: some 60 lists (120 with several parts per rank) and `trials` more are made and played,
about 10 microseconds per slot each.
Limits: a stage per part (DualPipe keeps two copies of the weights and is not among the named ones here); times that change from
step to step are not followed.
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (section 3: automatic scheduling).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import inf
from random import Random

from meshwright.parallel.pipeline.schedules import gpipe, interleaved, model_parallel, one_f_one_b
from meshwright.parallel.pipeline.schedules.dualpipe import dualpipev
from meshwright.parallel.pipeline.schedules.list_scheduler import ROUNDING, Rule, filled, fits, greedy, longest, split
from meshwright.parallel.pipeline.schedules.schedule import KEY, Costs, Order, Stage, Stuck, Timeline, count_faults, play
from meshwright.parallel.pipeline.schedules.zb_v import folded, v, v_half, v_min
from meshwright.parallel.pipeline.schedules.zero_bubble import h1, h2
from meshwright.plan.job.errors import Fault, raise_faults

Measure = Callable[[Timeline], float]
AHEAD = (2 / 3, 1.0, 1.5, 2.0, 3.0, inf)  # for one part per rank; for more, that much less
PATIENCE = (0.0, 0.5, 1.0)
KINDS = ("IFW", "IWF", "FIW")


def order(ranks: int, micros: int, chunks: int, costs: Costs) -> Order:
    """The lists found where all ranks wait for each other at the end; two parts per rank are folded."""
    stages = folded(ranks) if chunks == 2 else tuple(Stage(part % ranks, part) for part in range(ranks * chunks))
    return search(ranks, micros, costs, measure=lambda timeline: timeline.end, stages=stages).order


def search(
    ranks: int,
    micros: int,
    costs: Costs,
    limits: Sequence[float] = (),
    *,
    measure: Measure = longest,
    trials: int = 200,
    stages: tuple[Stage, ...] = (),
) -> Timeline:
    """The order found for these costs and its times; the number of parts is that of the costs, `ranks` or a multiple of it.

    Args:
        limits: what each rank may hold, in the unit of `costs.held`; nothing: all they want.
        measure: what shall be least. `longest` if ranks step one by one, `Timeline.end` if they wait for each other.
        trials: how many changes to the best order are tried.
        stages: where the parts shall lie; nothing: wherever that is best.

    Raises PlanError if the counts do not go together or a micro-batch does not fit, with the smallest limits that do.
    """
    raise_faults(faults(ranks, micros, costs, limits))
    room = list(limits) or [inf] * ranks
    best: Timeline | None = None
    for candidate in _candidates(ranks, micros, costs, room):
        if stages and candidate.stages != stages:
            continue
        found = play(candidate, costs)
        if fits(found, room) and (best is None or measure(found) < measure(best)):
            best = found
    if best is None:
        raise RuntimeError("no rule fits: the clock takes one micro-batch at a time where the room is small, so one must")
    return _improved(best, costs, room, measure, trials)


def named(ranks: int, micros: int, parts: int) -> Iterator[tuple[str, Order]]:
    """The schedules with names for so many parts, a multiple of the ranks, one stage each."""
    if parts == ranks:
        yield "model_parallel", model_parallel.order(ranks, micros)
        yield "gpipe", gpipe.order(ranks, micros)
        yield "one_f_one_b", one_f_one_b.order(ranks, micros)
        yield "h1", h1(ranks, micros)
        yield "h2", h2(ranks, micros)
        return
    yield "interleaved", interleaved.order(ranks, micros, parts // ranks)
    if parts == 2 * ranks:
        yield "v", v(ranks, micros)
        yield "v_half", v_half(ranks, micros)
        yield "v_min", v_min(ranks, micros)
        yield "dualpipev", dualpipev(ranks, micros)


def faults(ranks: int, micros: int, costs: Costs, limits: Sequence[float] = ()) -> Iterator[Fault]:
    """Why no order can be found."""
    parts = len(costs.forward)
    counts = list(count_faults(ranks, micros))
    yield from counts
    if counts:
        return
    if parts == 0 or parts % ranks:
        text = f"costs of {parts} parts on {ranks} ranks; needed is the same number of parts on each"
        yield Fault(text, f"cut the model into {max(1, round(parts / ranks)) * ranks} parts", KEY)
    elif limits and (len(limits) != ranks or not costs.held):
        text = f"{len(limits)} limits for {ranks} ranks, with {'' if costs.held else 'no '}word of what a micro-batch holds"
        yield Fault(text, "give a limit per rank, and costs.held per part", KEY)
    elif limits:
        least = [_least(ranks, placed, costs) for placed in _placements(ranks, parts)]
        if not any(_above(limits, each) for each in least):
            fewest = min(least, key=lambda each: sum(max(0.0, need - limit) for need, limit in zip(each, limits, strict=True)))
            rank = next(rank for rank in range(ranks) if limits[rank] * (1 + ROUNDING) < fewest[rank])
            text = f"rank {rank} may hold {limits[rank]:g}, and one micro-batch of its parts holds {fewest[rank]:g}"
            smallest = ", ".join(f"{need:g}" for need in fewest)
            yield Fault(text, f"the smallest limits that work are {smallest}; or cut the model elsewhere", KEY)


def _placements(ranks: int, parts: int) -> Iterator[tuple[Stage, ...]]:
    """Where parts can lie: dealt out in turn, and, if there are two per rank, folded."""
    yield tuple(Stage(part % ranks, part) for part in range(parts))
    if parts == 2 * ranks:
        yield folded(ranks)


def _least(ranks: int, stages: Sequence[Stage], costs: Costs) -> list[float]:
    """What one micro-batch holds on each rank when it turns round."""
    return [sum(costs.held[stage.part] for stage in stages if stage.rank == rank) for rank in range(ranks)]


def _above(limits: Sequence[float], least: Sequence[float]) -> bool:
    return all(limit * (1 + ROUNDING) >= need for limit, need in zip(limits, least, strict=True))


def _candidates(ranks: int, micros: int, costs: Costs, room: Sequence[float]) -> Iterator[Order]:
    parts = len(costs.forward)
    for _, order in named(ranks, micros, parts):
        yield order
        yield from (filled(split(order), costs, room, patience) for patience in (0.5, 1.0))
    for stages in _placements(ranks, parts):
        if room[0] == inf or _above(room, _least(ranks, stages, costs)):
            yield from (greedy(stages, micros, costs, rule, room) for rule in _rules(parts // ranks))


def _rules(chunks: int) -> Iterator[Rule]:
    for deep in (True, False)[: min(chunks, 2)]:
        for kinds in KINDS:
            yield from (Rule(kinds, ahead / chunks, patience, deep) for ahead in AHEAD for patience in PATIENCE)


def _improved(best: Timeline, costs: Costs, room: Sequence[float], measure: Measure, trials: int) -> Timeline:
    """`best` with slots moved, as long as that is no worse; the same moves whenever it is called."""
    random = Random(0)
    bound = max(map(best.busy, range(best.order.ranks)))
    for _ in range(trials):
        if measure(best) <= bound * (1 + ROUNDING):
            break
        try:
            found = play(_moved(best, random), costs)
        except Stuck:
            continue
        if fits(found, room) and measure(found) <= measure(best):
            best = found
    return best


def _moved(timeline: Timeline, random: Random) -> Order:
    """The order with one slot put earlier: into a gap before which it could have begun, or else before its neighbour."""
    order = timeline.order
    rank = random.choice([rank for rank, slots in enumerate(order.slots) if len(slots) > 1] or [0])
    slots, spans = list(order.slots[rank]), timeline.spans[rank]
    gaps = [at for at in range(1, len(slots)) if spans[at][0] > spans[at - 1][1] * (1 + ROUNDING)]
    to = random.choice(gaps) if gaps and random.random() < 0.7 else random.randrange(max(1, len(slots) - 1))
    later = min(to + 1 + int(random.expovariate(0.3)), len(slots) - 1)
    slots.insert(to, slots.pop(later))
    return Order(order.stages, tuple(chain(order.slots[:rank], [tuple(slots)], order.slots[rank + 1 :])))
