"""Zero-bubble pipelines: the backward in two halves, of which one can wait, so that it fills the bubble.

Why it works: the rank before needs the gradient of what went in (I) at once; nobody but the optimizer needs that of the weights
(W). So W stands where a rank would have nothing to do. H1 keeps the memory of 1F1B and delays W so far that the last ranks hold
as many micro-batches as the first; H2 also begins with more forwards, enough to fill the way there and back, and where F = I = W
nobody waits from its first slot to its last. 2p is made by a clock for given times (greedy.py), within twice the memory of 1F1B.

    H1, p = 3   rank 0   F0 F1 F2 .. .. I0 W0 F3 I1 W1    ...      after I of k, W of k - r and the next F
                rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 ...      p - r forwards ahead
                rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 ...
    H2, p = 3   rank 0   F0 F1 F2 F3 F4 I0 W0 F5 ...               after I of k, W of k - 2 r; 2 (p - r) - 1 forwards ahead
                rank 1   .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 ...
                rank 2   .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 ...

    idle time of a rank, from its first slot to its last = (p - 1) (F + I - W) (H1), (p - 1) (F + I - 2 W) (H2), about 0 (2p)
    held by the fullest rank = p micro-batches (H1), 2 p - 1 (H2), at most 2 p (2p); needs W <= F and W <= I

Later ranks begin and end later: H2 and 2p have no bubble if each rank steps when its own work is done. If a step waits for all
ranks, as it does for a norm over all gradients, it takes longer, where F = I = W by (p - 1) F, and H1 is then as short.
Any number of micro-batches works; below p (H1) and 2 p - 1 (H2) the lists are those of fewer forwards ahead.
Cost: all that a forward keeps is held until W, and from I on the gradients of what layers give out, in a Llama's block 0.6 of
what it keeps; a backward in two halves launches more kernels. Bytes are those of 1F1B; weights in shards are gathered for W too.
Limits: 2p needs about 3 p micro-batches and known times; parts whose I and W cannot be told apart gain nothing. Weights that a
function written in Python takes in, such as columns divided along tp, have their gradients in I.
Paper: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (sections 2 and 3, tables 1 and 2).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from meshwright.parallel.pipeline.schedules.list_scheduler import Rule, filled, fits, greedy, longest
from meshwright.parallel.pipeline.schedules.schedule import Costs, Order, Slot, count_faults, play
from meshwright.plan.job.errors import Fault, raise_faults

RULES = tuple(
    Rule(kinds, ahead, patience) for kinds in ("IFW", "FIW") for ahead in (1.0, 2.0, 3.0) for patience in (0.0, 0.5, 1.0)
)


def h1(ranks: int, micros: int) -> Order:
    """The lists of ZB-H1: the memory of 1F1B, about a third of its bubble."""
    return _by_hand(ranks, micros, lambda rank: ranks - rank, lambda rank: rank)


def h2(ranks: int, micros: int) -> Order:
    """The lists of ZB-H2: twice the memory of 1F1B, no bubble where all slots take the same time."""
    return _by_hand(ranks, micros, lambda rank: 2 * (ranks - rank) - 1, lambda rank: 2 * rank)


def two_p(ranks: int, micros: int, costs: Costs) -> Order:
    """The lists of ZB-2p, made for these costs: no rank holds more than 2 `ranks` micro-batches of its part."""
    return within(ranks, micros, costs, 2 * ranks)


def within(ranks: int, micros: int, costs: Costs, room: int) -> Order:
    """The lists in which the busiest rank takes the least time, of those that `RULES`, H1 and H2 give for these costs.

    No rank holds more than `room` micro-batches of its part; ZB-1p is that with `ranks`. Without `costs.held`, a micro-batch
    keeps one unit until W.
    """
    raise_faults(faults(ranks, micros))
    if not costs.held:
        costs = replace(costs, held=[1.0] * ranks, late=[1.0] * ranks)
    limits = [room * held for held in costs.held]
    hand = [h1(ranks, micros), h2(ranks, micros)]
    made = [greedy(hand[0].stages, micros, costs, rule, limits) for rule in RULES]
    timed = [play(order, costs) for order in (*hand, *(filled(order, costs, limits) for order in hand), *made)]
    return min((timeline for timeline in timed if fits(timeline, limits)), key=longest).order


def faults(ranks: int, micros: int) -> Iterator[Fault]:
    """Why these counts cannot work."""
    yield from count_faults(ranks, micros)


def _by_hand(ranks: int, micros: int, ahead: Callable[[int], int], late: Callable[[int], int]) -> Order:
    """Lists with `ahead(rank)` forwards before the first gradient and W `late(rank)` micro-batches behind I."""
    raise_faults(faults(ranks, micros))
    return Order.looped(_slots(rank, min(ahead(rank), micros), min(late(rank), micros), micros) for rank in range(ranks))


def _slots(rank: int, ahead: int, late: int, micros: int) -> Iterator[Slot]:
    yield from (Slot("F", rank, micro) for micro in range(ahead))
    for micro in range(micros):
        yield Slot("I", rank, micro)
        if micro >= late:
            yield Slot("W", rank, micro - late)
        if micro + ahead < micros:
            yield Slot("F", rank, micro + ahead)
    yield from (Slot("W", rank, micro) for micro in range(micros - late, micros))
