"""PipeDream: 1F1B that never empties, where every micro-batch is a step of its own and parts differ in how new their weights are.

Why it works: the bubble comes from waiting, at the end of a step, until all gradients are in. Here nobody waits: a part updates
its weights right after each backward, and the next forward takes the newest ones. Of a micro-batch whose forward ran before an
update and whose backward runs after it, the two would meet different weights; so a part keeps (stashes) those of every forward
until its backward. What results is a gradient, at weights that are a little old on the first parts: descent with a bounded delay.

    F3/1 is the forward of micro-batch 3 with weights that have seen one update; the backward uses the same
    rank 0   F0/0  F1/0  F2/0  ....  ....  B0/0  F3/1  B1/0  F4/2  B2/0  F5/3  B3/1
    rank 1   ....  F0/0  F1/0  ....  B0/0  F2/1  B1/0  F3/2  B2/1  F4/3  B3/2  F5/4
    rank 2   ....  ....  F0/0  B0/0  F1/1  B1/1  F2/2  B2/2  F3/3  B3/3  F4/4  B4/4

    micro-batch k, part s of p:  w(s, k + 1) = w(s, k) - rate * gradient of part s at versions v(0, k) .. v(p - 1, k)
    v(s, k) = max(0, k - (p - 1 - s)): once the pipeline is full, p - 1 - s updates old

Cost: no bubble but that of the first and the last micro-batches of a run, (p - 1) / (n + p - 1) of n; part s keeps p - s versions
of its weights and the activations of as many micro-batches, so memory is even where weights weigh more than activations.
Limits: not what one device computes, nor a plain step: the delay asks for a smaller rate or a warm-up. Nothing that looks at all
parts at once fits in between, as clipping by the norm of the whole gradient does. Without stashing it is not even a gradient.
Paper: Narayanan et al. 2019, "PipeDream", SOSP (section 3.3); Harlap et al. 2018, "PipeDream: Fast and Efficient Pipeline
Parallel DNN Training", arXiv 1806.03377.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.core.errors import Fault
from meshwright.strategies.pipeline import one_f_one_b
from meshwright.strategies.pipeline.counts import count_faults
from meshwright.strategies.pipeline.order import Order


class Version(NamedTuple):
    """How many updates the weights of `stage` have seen that a micro-batch meets, forward and backward."""

    stage: int
    micro: int
    forward: int
    backward: int


def order(ranks: int, micros: int) -> Order:
    """The lists of `ranks` ranks, a part each, for `micros` micro-batches: all those after which the pipeline empties."""
    return one_f_one_b.order(ranks, micros)


def versions(order: Order, *, stashed: bool = True) -> list[Version]:
    """The weights that each stage uses for each micro-batch when it updates them after each backward, in the order of backwards.

    `stashed` keeps the weights of a forward for its backward; otherwise a backward meets the newest ones.
    """
    found: list[Version] = []
    for slots in order.slots:
        seen = [0] * len(order.stages)
        used: dict[tuple[int, int], int] = {}
        newest: dict[tuple[int, int], int] = {}
        for kind, stage, micro in slots:
            if kind == "F":
                used[stage, micro] = seen[stage]
            if kind in ("B", "I"):
                newest[stage, micro] = seen[stage]
            if kind in ("B", "W"):
                forward = used[stage, micro]
                found.append(Version(stage, micro, forward, forward if stashed else newest[stage, micro]))
                seen[stage] += 1
    return found


def kept(order: Order) -> list[int]:
    """The most versions of its weights that each stage keeps at once, the newest one among them."""
    most = [1] * len(order.stages)
    for slots in order.slots:
        seen = [0] * len(order.stages)
        used: dict[tuple[int, int], int] = {}
        for kind, stage, micro in slots:
            if kind == "F":
                used[stage, micro] = seen[stage]
            needed = {version for (at, _), version in used.items() if at == stage}
            most[stage] = max(most[stage], len(needed | {seen[stage]}))
            if kind in ("B", "W"):
                del used[stage, micro]
                seen[stage] += 1
    return most


def faults(ranks: int, micros: int) -> Iterator[Fault]:
    """Why these counts cannot work."""
    yield from count_faults("strategies.pipedream", ranks, micros)
