"""The schedules by name: what makes the lists of each, how many parts of the model a rank has in it, and what it refuses.

1f1b, gpipe, model_parallel, zb_*    part k on rank k
interleaved                          part k on rank k modulo the ranks; as many per rank as `chunks` says
zb_v, zb_v_half, zb_v_min, dualpipev part k on rank k, and on 2 ranks - 1 - k behind the turn
dualpipe                             part k on rank k, and on ranks - 1 - k for the other half of the micro-batches
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from meshwright.core.errors import Fault
from meshwright.strategies.pipeline import gpipe, interleaved, model_parallel, one_f_one_b
from meshwright.strategies.pipeline.order import Costs, Order, Stage

Make = Callable[[int, int, int, Costs], Order]  # of ranks, micro-batches, parts per rank and what the parts cost
Refuse = Callable[[int, int], Iterator[Fault]]


@dataclass(frozen=True)
class Schedule:
    """A way to make lists. `chunks` are the parts per rank, 0 where that is for the plan to say."""

    make: Make
    refuse: Refuse
    chunks: int = 1

    def stages(self, ranks: int, chunks: int) -> tuple[Stage, ...]:
        """Which part lies where, for any number of micro-batches."""
        return self.make(ranks, 1, chunks, Costs.equal(ranks * chunks)).stages


def _plain(order: Callable[[int, int], Order], refuse: Refuse, chunks: int = 1) -> Schedule:
    return Schedule(lambda ranks, micros, _chunks, _costs: order(ranks, micros), refuse, chunks)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        "model_parallel": _plain(model_parallel.order, model_parallel.faults),
        "gpipe": _plain(gpipe.order, gpipe.faults),
        "1f1b": _plain(one_f_one_b.order, one_f_one_b.faults),
        "interleaved": Schedule(
            lambda ranks, micros, chunks, _costs: interleaved.order(ranks, micros, chunks), interleaved.faults, chunks=0
        ),
    }
)
